"""``mlx_lm.server`` as a user starts it, and requests to it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(sys.executable).parent
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Reply:
    """What a request gave, streamed or not."""

    text: str
    finish_reason: str
    usage: dict
    choice: dict  # the last one

    @property
    def shown(self):
        """What must not depend on the drafter."""
        usage = {k: v for k, v in self.usage.items() if k != DETAILS}
        return self.text, self.finish_reason, usage

    @property
    def drafts(self):
        """Accepted and rejected, or None where no assistant took part."""
        details = self.usage.get(DETAILS)
        if details is None:
            return None
        return tuple(details[f"{w}_prediction_tokens"] for w in WORDS)


RETRIES = 20
DETAILS, WORDS = "completion_tokens_details", ("accepted", "rejected")


class Server:
    """A server process; a context manager."""

    def __init__(self, *arguments, command=(str(SCRIPTS / "mlx_lm.server"),), **env):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *map(str, arguments), "--port", str(self.port)],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"} | env,
        )

    def __enter__(self):
        return self

    def ready(self):
        """This server, once it answers."""
        for _ in range(600):
            assert self.process.poll() is None, self.log()
            try:
                if self.get("/health")[0] == 200:
                    return self
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise TimeoutError(self.log())

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.output.close()

    def log(self):
        self.output.seek(0)
        return self.output.read()

    def rss(self):
        """Resident memory, in kilobytes."""
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def get(self, path):
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()

    def post(self, body, path=CHAT):
        """The status and the body of the answer; ``body`` may be raw bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        for _ in range(RETRIES):
            connection = self.connect()
            try:
                connection.request(
                    "POST", path, raw, {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
            except ConnectionError as e:
                # Only five clients may wait to be let in, see patches/README.md.
                if type(e) is not ConnectionResetError:
                    raise AssertionError(self.log()) from e
                time.sleep(0.2)
            else:
                return response.status, response.read().decode()
        raise AssertionError(self.log())

    def ask(self, path=None, **body):
        """A chat or, with ``prompt``, a text completion that must succeed."""
        path = path or (TEXT if "prompt" in body else CHAT)
        if body.get("stream"):
            body.setdefault("stream_options", {"include_usage": True})
        status, answer = self.post(body, path)
        assert status == 200, answer
        return streamed(answer) if body.get("stream") else whole(json.loads(answer))

    def leave(self, after, **body):
        """Disconnect after reading that many bytes of the answer."""
        path = TEXT if "prompt" in body else CHAT
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n"
        with (
            socket.create_connection(("127.0.0.1", self.port)) as connection,
            contextlib.suppress(ConnectionResetError),  # it had no room, see post
        ):
            connection.sendall(head.encode() + raw)
            if after:
                connection.recv(after)


def whole(answer):
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Reply(text or "", choice["finish_reason"], answer["usage"], choice)


def events(answer):
    """The JSON of each event of a stream; comments keep it alive."""
    lines = [line for line in answer.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", answer
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed(answer):
    *chunks, last = events(answer)
    choices = [chunk["choices"][0] for chunk in chunks]
    parts = [c["delta"].get("content") if "delta" in c else c["text"] for c in choices]
    text = "".join(part or "" for part in parts)
    return Reply(text, choices[-1]["finish_reason"], last["usage"], choices[-1])
