// The playground: sends the fields to Python in a worker, and shows what comes back.
import first from './first.js'

const root = document.querySelector('.playground')
const form = root.querySelector('form')
const fields = ['expression', 'shape', 'devices'].map((name) => form.elements[name])
const part = (name) => root.querySelector(`[data-part=${name}]`)
const worker = new Worker(new URL('worker.js', import.meta.url), { type: 'module' })

let running = true // until Python has started
let asked = false // while it runs, only the last change counts

const show = (state, status = '') => {
  root.dataset.state = state
  part('status').textContent = status
}

const ask = () => {
  asked = running
  if (running) return
  running = true
  root.dataset.state = 'running'
  worker.postMessage(fields.map((field) => field.value))
}

const showResult = ({ svg, words, spec, mesh, warning }) => {
  part('picture').innerHTML = svg // made by einshard, which escapes names
  part('words').replaceChildren(
    ...words.map((line) => Object.assign(document.createElement('p'), { textContent: line })),
  )
  part('spec').textContent = spec
  part('mesh').textContent = mesh
  part('warning').textContent = warning ?? ''
  part('warning').hidden = !warning
  part('result').hidden = false
}

const showError = ({ error, fix }) => {
  // long lines wrap, except the expression and the carets below it
  const lines = error.split('\n').map((text) => {
    const line = Object.assign(document.createElement('span'), { textContent: `${text}\n` })
    line.classList.toggle('exact', text.startsWith('    '))
    return line
  })
  part('error').replaceChildren(...lines)
  part('fix').hidden = !fix
  part('fix').textContent = `Use ${fix}`
  part('fix').onclick = () => change({ expression: fix })
}

worker.onmessage = ({ data }) => {
  running = false
  if (data.failed) return show('failed', `Python failed: ${data.failed}`)
  if (data.error) showError(data)
  else if (!data.started) showResult(data)
  part('problem').hidden = !data.error
  part('result').inert = Boolean(data.error) // what was right before
  if (asked || data.started) ask()
  else show('ready')
}
worker.onerror = (event) => show('failed', `Python did not load: ${event.message ?? 'no network?'}`)

// the fields are in the address, so that a link shows the same
const link = () => {
  const state = new URLSearchParams(fields.map((field) => [field.name, field.value]))
  history.replaceState(null, '', `#${state}`)
}

const change = (values) => {
  for (const field of fields) field.value = values[field.name] ?? field.value
  ask()
  link()
}

const follow = () => {
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)))
  for (const field of fields) field.value = state[field.name] ?? first[field.name]
  ask()
}

let timer
form.addEventListener('input', () => {
  clearTimeout(timer)
  timer = setTimeout(() => change({}), 150)
})
form.addEventListener('submit', (event) => {
  event.preventDefault()
  change({})
})
for (const button of root.querySelectorAll('[data-expression]'))
  button.addEventListener('click', () => change(button.dataset))
part('copy').addEventListener('click', async () => {
  link()
  try {
    await navigator.clipboard.writeText(location.href)
    part('status').textContent = 'Link copied.'
  } catch {
    part('status').textContent = 'The link is in the address bar.'
  }
})
window.addEventListener('hashchange', follow)

show('loading', 'Loading Python, up to 14 MB …')
// Pyodide never returns if its download fails
setTimeout(() => {
  if (root.dataset.state === 'loading')
    show('loading', 'Still loading Python. Reload the page if nothing happens.')
}, 60e3)
follow()
if (fields.every((field) => field.value === first[field.name])) showResult(first.result)
