"""mlx_lm.server with an assistant answers many clients at once."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest
from conftest import PAIRS
from serving import Server

OPTIONS = [
    {},
    {},
    {"repetition_penalty": 1.3},
    {"num_draft_tokens": 0},
    {"num_draft_tokens": 2},
    {"draft_model": None},
    {"seed": 1},
]
WORDS = "import os\nclass Test:\n    def run(self, value):\n        return value + 1\n"


def random_request(dice):
    """A greedy request of random length and settings."""
    text = WORDS[: dice.randint(9, len(WORDS))] * dice.randint(1, 4)
    tokens = dice.choice([1, 8, 24, 60])
    return {"prompt": text, "max_tokens": tokens, **dice.choice(OPTIONS)}


def shown(reply):
    return reply.text, reply.finish_reason, reply.usage["completion_tokens"]


class Crowd:
    """Clients that ask, some of whom leave early."""

    def __init__(self, server, wanted):
        self.server, self.wanted = server, wanted
        self.slowest = 0.0
        self.answers = 0

    def client(self, number, until):
        dice = random.Random(number)
        while True:
            body = dice.choice(self.wanted)[0]
            stream = dice.random() < 0.5
            if dice.random() < 0.1:
                self.server.leave(dice.choice([0, 300]), **body, stream=True)
            else:
                start = time.monotonic()
                reply = self.server.ask(**body, stream=stream)
                self.slowest = max(self.slowest, time.monotonic() - start)
                self.answers += 1
                assert [body, shown(reply)] in self.wanted
            if until():
                return

    def run(self, clients, until):
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda n: self.client(n, until), range(clients)))


@pytest.fixture(scope="module", params=["e", "moe"])
def crowd(request):
    """A crowd, and what a server without assistant answers each request alone."""
    folder = PAIRS / request.param
    command = "--model", folder / "target", "--prompt-cache-size", 8
    dice = random.Random(7)
    bodies = [random_request(dice) for _ in range(12)]
    with Server(*command) as plain:
        plain.ready()
        bare = ("draft_model", "num_draft_tokens")
        wanted = [
            [b, shown(plain.ask(**{k: b[k] for k in b if k not in bare}))]
            for b in bodies
        ]
    assistant = "--mtp-assistant", folder / "assistant"
    concurrency = "--decode-concurrency", 16, "--prompt-concurrency", 4
    with Server(*command, *assistant, *concurrency) as server:
        yield Crowd(server.ready(), wanted)


def test_eight_clients_get_what_each_gets_alone(crowd):
    crowd.run(8, lambda: crowd.answers > 30)
    assert "Traceback" not in crowd.server.log()


@pytest.mark.slow
def test_sixty_four_clients_for_ten_minutes(crowd):
    """Memory stays what it was, and nobody waits for ever.

    What a server holds from one moment to the next depends on who is being served, so
    samples of minutes 2 to 6 and 6 to 10 are compared by their medians.
    """
    start, sizes = time.monotonic(), []
    until = start + 600

    def watch():
        while time.monotonic() < until:
            sizes.append((time.monotonic() - start, crowd.server.rss()))
            time.sleep(5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    crowd.run(64, lambda: time.monotonic() > until)
    watcher.join()
    early = median(size for second, size in sizes if 120 <= second < 360)
    late = median(size for second, size in sizes if second >= 360)
    print(early, late, "kB,", crowd.answers, "answers, slowest", crowd.slowest)
    assert late < 1.05 * early, sizes
    assert crowd.slowest < 60
    assert "Traceback" not in crowd.server.log()
