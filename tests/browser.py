"""Headless Chromium for tests."""

import itertools
import json
import os
import subprocess


class Browser:
    """A page in Chromium, controlled by the DevTools protocol over a pipe.

    Attributes:
        errors: exceptions that no script of the page caught.
    """

    def __init__(self, binary, profile):
        (child_reads, self.write), (self.read, child_writes) = os.pipe(), os.pipe()
        options = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic']
        options += ['--remote-debugging-pipe', f'--user-data-dir={profile}']
        self.process = subprocess.Popen(
            # it reads commands from file 3 and writes to file 4
            ['bash', '-c', f'exec "$@" 3<&{child_reads} 4>&{child_writes}', '', binary, *options],
            pass_fds=(child_reads, child_writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(child_reads)
        os.close(child_writes)
        self.ids, self.received, self.session, self.errors = itertools.count(1), b'', {}, []
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        session = self.call('Target.attachToTarget', targetId=target, flatten=True)
        self.session = {'sessionId': session['sessionId']}
        self.call('Runtime.enable')
        self.call('Page.enable')

    def call(self, method, **parameters):
        number = next(self.ids)
        message = {'id': number, 'method': method, 'params': parameters, **self.session}
        os.write(self.write, json.dumps(message).encode() + b'\0')
        while True:
            while b'\0' not in self.received:
                received = os.read(self.read, 1 << 20)
                assert received, 'Chromium has ended'
                self.received += received
            text, _, self.received = self.received.partition(b'\0')
            reply = json.loads(text)
            if reply.get('method') == 'Runtime.exceptionThrown':
                self.errors.append(reply['params']['exceptionDetails'])
            if reply.get('id') == number:
                return reply['result']

    def run(self, script):
        """Evaluates JavaScript; waits for promises."""
        result = self.call(
            'Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True
        )
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def close(self):
        os.write(self.write, json.dumps({'id': 0, 'method': 'Browser.close'}).encode() + b'\0')
        self.process.wait(30)
        os.close(self.write)
        os.close(self.read)
