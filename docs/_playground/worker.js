// Runs einshard's own parser, pictures and errors in Pyodide, apart from the page.
import { loadPyodide } from './pyodide.mjs'

const start = async () => {
  const [python, bundle] = await Promise.all([
    loadPyodide(),
    fetch(new URL('einshard.zip', import.meta.url)).then((reply) => {
      if (!reply.ok) throw new Error(`einshard.zip: ${reply.status}`)
      return reply.arrayBuffer()
    }),
  ])
  python.unpackArchive(bundle, 'zip')
  return python.pyimport('playground').answer
}

const started = start()
started.then(
  () => postMessage({ started: true }),
  (error) => postMessage({ failed: String(error) }),
)

onmessage = async ({ data }) => {
  try {
    const answer = await started
    postMessage(JSON.parse(answer(...data)))
  } catch (error) {
    postMessage({ failed: String(error) })
  }
}
