"""mlx_lm.server with an assistant answers as without, and keeps answering."""

import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

import mlx_lm.server
import numpy as np
import openai
import pytest
from conftest import PAIRS
from mlx_lm import generate, load
from serving import SCRIPTS, TEXT, Server, events

from mlx_lm_mtp import MTPError
from mlx_lm_mtp.host.flags import AssistantPath, Drafting

NAMES = ("e", "moe")


def arguments(name):
    return "--model", PAIRS / name / "target"


def assistant(name):
    return "--mtp-assistant", PAIRS / name / "assistant"


@pytest.fixture(scope="module")
def fleet():
    """By pair, a server with the assistant and one without; they start at once."""
    with ExitStack() as stack:
        yield {
            name: [
                # Pinned, as on a busy machine no draft may pay.
                stack.enter_context(
                    Server(*arguments(name), *assistant(name), "--num-draft-tokens", 3)
                ),
                stack.enter_context(Server(*arguments(name))),
            ]
            for name in NAMES
        }


@pytest.fixture(scope="module", params=NAMES)
def servers(request, fleet):
    return [server.ready() for server in fleet[request.param]]


@pytest.fixture(scope="module")
def server(fleet):
    return fleet["e"][0].ready()


@pytest.fixture(scope="module")
def chunks():
    """Held-out code, in pieces of about 40 tokens."""
    _, tokenizer = load(str(PAIRS / "e" / "target"))
    prompts = np.load(PAIRS / "prompts.npy")
    return [tokenizer.decode(row) for row in prompts.reshape(-1, 40).tolist()]


def user(text):
    return {"role": "user", "content": text}


def both(servers, ask):
    """What each server answers, asked side by side."""
    with ThreadPoolExecutor() as pool:
        return pool.map(ask, servers)


def converse(server, texts, tokens):
    """A conversation, every other turn streamed."""
    messages, replies = [{"role": "system", "content": "x = 1"}], []
    for i, text in enumerate(texts):
        messages.append(user(text))
        stream = bool(i % 2)
        body = {"messages": messages, "max_tokens": tokens, "stream": stream}
        replies.append(server.ask(**body))
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies


def compare(servers, texts, tokens):
    ours, theirs = both(servers, lambda s: converse(s, texts, tokens))
    assert [r.shown for r in ours] == [r.shown for r in theirs]
    assert all(r.drafts is None for r in theirs)
    for reply in ours:
        accepted, rejected = reply.drafts
        assert 0 <= accepted <= reply.usage["completion_tokens"] and rejected >= 0
    return ours


def test_conversations(servers, chunks):
    """Texts, finish reasons, usage and cache hits; the window wraps several times."""
    replies = compare(servers, chunks[:5], 40)
    assert sum(r.usage["prompt_tokens_details"]["cached_tokens"] for r in replies) > 0
    assert sum(r.drafts[0] for r in replies) > 0


@pytest.mark.slow
def test_twenty_conversations(servers, chunks):
    for i in range(20):
        compare(servers, chunks[i::24][:5], 40 + 2 * i)


def same(servers, **body):
    """Both servers' answer to a request, which must be the same."""
    ours, theirs = both(servers, lambda s: s.ask(**body))
    for reply in (ours, theirs):
        reply.usage.pop("prompt_tokens_details")  # they have seen other requests
    assert ours.shown == theirs.shown
    return ours, theirs


def test_a_warm_turn_equals_a_cold_one(server, chunks):
    messages = [user(chunks[30])]
    first = server.ask(messages=messages, max_tokens=40)
    messages += [{"role": "assistant", "content": first.text}, user(chunks[31])]
    warm = server.ask(messages=messages, max_tokens=40)
    model, tokenizer = load(str(PAIRS / "e" / "target"))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cold = generate(model, tokenizer, prompt, max_tokens=40)
    assert warm.text == cold
    hits = warm.usage["prompt_tokens_details"]["cached_tokens"]
    assert first.usage["prompt_tokens"] <= hits + 1 < len(prompt)


OPTIONS = {
    "a repetition penalty": {"repetition_penalty": 1.3},
    "other penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "a logit bias": {"logit_bias": {"5": 9.0, "100": 2.0}},
    "one token": {"max_tokens": 1},
    "two tokens, streamed": {"max_tokens": 2, "stream": True},
    "one draft": {"num_draft_tokens": 1},
    "null for the default": {"num_draft_tokens": None},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_give_the_same_text(server, chunks, case):
    """Twice, so that the second finds the first's cache; without the assistant, then
    with it."""
    body = {"messages": [user(chunks[40])], "max_tokens": 24, **OPTIONS[case]}
    plain = server.ask(**body, draft_model=None)
    assert plain.drafts is None
    for _ in range(2):
        reply = server.ask(**body)
        assert reply.drafts is not None
        assert (reply.text, reply.finish_reason) == plain.shown[:2]


def test_drafts_of_zero_turn_drafting_off(server, chunks):
    body = {"prompt": chunks[41], "max_tokens": 20}
    drafted, off = (server.ask(**body, num_draft_tokens=n) for n in (3, 0))
    assert off.text == drafted.text and off.drafts == (0, 0) != drafted.drafts
    assert "MTP: not used for this request: its num_draft_tokens is 0" in server.log()


def test_stop_words_inside_and_across_rounds(servers, chunks):
    """Stop words of one to three tokens that begin anywhere in the text."""
    _, tokenizer = load(str(PAIRS / "e" / "target"))
    body = {"messages": [user(chunks[42])], "max_tokens": 24}
    text = same(servers, **body)[0].text
    pieces = [tokenizer.decode([t]) for t in tokenizer.encode(text)[1:]]
    for start in range(1, 9):
        words = ["".join(pieces[start : start + 1 + start % 3]), "no such text"]
        ours, _ = same(servers, **body, stop=words, stream=bool(start % 2))
        assert ours.finish_reason == "stop" and len(ours.text) < len(text)


def test_logprobs(servers, chunks):
    body = {"messages": [user(chunks[43])], "max_tokens": 12, "logprobs": True}
    for top in (-1, 5):
        ours, theirs = (
            r.choice["logprobs"]["content"]
            for r in same(servers, **body, top_logprobs=top)
        )
        assert [token["id"] for token in ours] == [token["id"] for token in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            tops = [[t["id"] for t in x.get("top_logprobs", ())] for x in (mine, other)]
            assert sorted(tops[0]) == sorted(tops[1]) and len(tops[0]) == max(top, 0)


def test_a_seed_reproduces_a_text(server, chunks):
    body = {"prompt": chunks[44], "max_tokens": 30, "temperature": 1.0}
    body["num_draft_tokens"] = 3  # the number that is fastest varies
    one, two = (server.ask(**body, seed=5) for _ in range(2))
    assert one.text == two.text != server.ask(**body, seed=6).text
    assert one.drafts is not None and sum(one.drafts) > 0


def test_coupled_gives_the_seeds_own_text(chunks):
    body = {"prompt": chunks[44], "max_tokens": 30, "temperature": 1.0, "seed": 5}
    coupled = "--mtp-verification", "coupled", "--num-draft-tokens", 2
    with Server(*arguments("moe"), *assistant("moe"), *coupled) as server:
        server.ready()
        plain = server.ask(**body, draft_model=None)
        assert server.ask(**body).text == plain.text
        assert re.search(r"accepted by position \d+% \d+%,", server.log())


# Tools and reasoning ------------------------------------------------------------------

CALL = '<tool_call>{"arguments": 1}</tool_call>\n'


@pytest.fixture(scope="module")
def tool_servers(tmp_path_factory):
    """A target that knows tools and reasoning; it repeats what it has read."""
    folder = tmp_path_factory.mktemp("tools") / "target"
    shutil.copytree(PAIRS / "e" / "target", folder)
    file = folder / "tokenizer.json"
    text = file.read_text().replace("<image_soft_token>", "<think>")
    file.write_text(text.replace("<video_soft_token>", "</think>"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["tool_parser_type"] = "json_tools"
    config["chat_template"] = (
        "{{ bos_token }}{% if reasoning %}<think>{% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    file.write_text(json.dumps(config))
    with (
        Server("--model", folder, *assistant("e")) as ours,
        Server("--model", folder) as theirs,
    ):
        yield ours.ready(), theirs.ready()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_reasoning(tool_servers, reasoning, stream):
    body = {
        "messages": [user(CALL * 6)],
        "max_tokens": 45,
        "tools": TOOLS,
        "chat_template_kwargs": {"reasoning": reasoning},
        "stream": stream,
        "stop": "1}</tool_call>\n<tool_call>{",
    }

    def told(server):
        status, answer = server.post(body)
        assert status == 200, answer
        if not stream:
            return [json.loads(answer)["choices"][0]]
        return [e["choices"][0]["delta"] for e in events(answer)]

    ours, theirs = ([plain_of(m) for m in told(s)] for s in tool_servers)
    assert ours == theirs and "arguments" in str(ours)


def plain_of(message):
    """Without the random names of the calls."""
    return json.loads(json.dumps(message), object_hook=lambda d: d | {"id": None})


# What changes between requests --------------------------------------------------------


def test_models_and_assistants_change_by_request(server, chunks):
    """The default assistant does not fit the other target; its own does."""
    body = {"prompt": chunks[45], "max_tokens": 12}
    moe = {"model": str(PAIRS / "moe" / "target")}
    own = {"draft_model": str(PAIRS / "moe" / "assistant")}
    before = server.ask(**body)
    plain, drafted = server.ask(**body, **moe), server.ask(**body, **moe, **own)
    assert plain.drafts is None and drafted.drafts is not None
    assert plain.text == drafted.text != before.text
    assert "not used for this request: the assistant in" in server.log()
    status, answer = server.post(body | own, TEXT)
    assert status == 400 and "does not fit this target" in answer
    status, answer = server.post(body | {"model": "no/such"}, TEXT)
    assert status == 404
    after = server.ask(**body)
    assert after.text == before.text and after.drafts is not None


def test_changing_the_assistant_loads_the_target_once(monkeypatch):
    """Also back and forth; another target is loaded, and drops the drafter."""
    loads = []

    def counted(path, **options):
        loads.append(path)
        return load(path, **options)

    monkeypatch.setattr(mlx_lm.server, "load", counted)
    e, moe = (str(PAIRS / name / "target") for name in NAMES)
    drafter = str(PAIRS / "e" / "assistant")
    args = Namespace(
        model=e,
        adapter_path=None,
        draft_model=AssistantPath.of(drafter),
        trust_remote_code=False,
        chat_template=None,
        use_default_chat_template=False,
        pipeline=False,
    )
    provider = mlx_lm.server.ModelProvider(args)
    provider.load_default()
    first, key = provider.draft_model, provider.model_key
    assert isinstance(first, Drafting) and provider.is_batchable
    for draft in (None, "default_model", drafter):
        provider.load("default_model", None, draft)
        assert provider.draft_model is (first if draft else None)
        assert provider.model_key == key
    assert loads == [e]
    provider.load(moe, None, "default_model")
    assert provider.draft_model is None and loads == [e, moe]
    with pytest.raises(MTPError, match="does not fit"):
        provider.load(moe, None, drafter)
    with pytest.raises(FileNotFoundError, match="no folder"):
        provider.load(moe, None, "/no/such")
    provider.load("default_model", None, "default_model")
    assert isinstance(provider.draft_model, Drafting) and loads == [e, moe, e]


ANY = {"prompt": "import os", "max_tokens": 4}
MISTAKES = {
    "malformed JSON": (b'{"prompt": ', 400, "Invalid JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "utf-8"),
    "no object": ([1], 400, "dictionary"),
    "no prompt": ({}, 400, "prompt"),
    "no text": (ANY | {"prompt": {"a": 1}}, 400, "makes no prompt"),
    "a negative number of drafts": (ANY | {"num_draft_tokens": -1}, 400, "at least 0"),
    "half a draft": (ANY | {"num_draft_tokens": 1.5}, 400, "num_draft_tokens"),
    "an assistant by number": (ANY | {"draft_model": 5}, 400, "draft_model must be"),
    "an unknown assistant": (ANY | {"draft_model": "/no/such"}, 404, "no folder"),
    "a target as a model": (ANY | {"model": "/no/such"}, 404, ""),
    "a number to stop at": (ANY | {"stop": 5}, 400, "stop must be"),
    "numbers to stop at": (ANY | {"stop": [5]}, 400, "stop must be"),
    "options for streaming": (ANY | {"stream_options": 5}, 400, "stream_options"),
    "no tokens": (ANY | {"max_tokens": 0}, 400, "max_tokens"),
    "a top k beyond the vocabulary": (
        ANY | {"top_k": 10**6, "temperature": 1.0},
        400,
        "top_k",
    ),
    "the same without drafts": (
        ANY | {"top_k": 10**6, "temperature": 1.0, "draft_model": None},
        400,
        "top_k",
    ),
    "a threshold that XTC cannot have": (
        ANY | {"xtc_probability": 0.9, "xtc_threshold": 0.9, "temperature": 1.0},
        400,
        "xtc_threshold",
    ),
    "several texts": (ANY | {"prompt": ["a", "b"]}, 400, "makes no prompt"),
    "one text in a list": (ANY | {"prompt": ["import os"]}, 400, "makes no prompt"),
    "hotter than any number": (ANY | {"temperature": 10**400}, 400, "too large"),
    "a penalty beyond numbers": (
        ANY | {"repetition_penalty": 10**400},
        400,
        "repetition_penalty is too large",
    ),
    "a bias beyond numbers": (ANY | {"logit_bias": {"5": 10**400}}, 400, "too large"),
    "a context of no end": (ANY | {"presence_context_size": 10**30}, 400, "too large"),
    "a bias of no token": (ANY | {"logit_bias": {"2048": 1}}, 400, "there are 2048"),
    "a seed too large": (ANY | {"seed": 2**70}, 400, "seed"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_have_their_code_and_one_line(server, case):
    body, code, words = MISTAKES[case]
    status, answer = server.post(body, TEXT)
    error = json.loads(answer)["error"]
    assert (status, words in error) == (code, True), answer
    assert server.ask(**ANY).drafts is not None


FAULT = """
import mlx_lm_mtp.generate as g
step = g.mtp_generate_step
def faulty(*args, max_tokens, **kwargs):
    for i, emission in enumerate(step(*args, max_tokens=max_tokens, **kwargs)):
        if max_tokens == 13 and i == 5:
            raise RuntimeError("no memory\\nleft")
        yield emission
g.mtp_generate_step = faulty
import mlx_lm_mtp.decoding as d
launch, marked = d.Decoding._launch, []
def faulty_launch(self, seed):
    for row in self.rows:
        if row.left == 13:
            marked.append(row)
        if row in marked and row.left < 9:
            raise RuntimeError("no memory\\nleft")
    return launch(self, seed)
d.Decoding._launch = faulty_launch
from mlx_lm.server import main
main()
"""


def test_an_error_in_a_generation(chunks):
    """The client is told, and the next one is served."""
    command = sys.executable, "-c", FAULT
    with Server(*arguments("e"), *assistant("e"), command=command) as server:
        body = {"prompt": "import os", "max_tokens": 13}
        for seed in (None, 1):  # in the batch loop, and one by one
            status, answer = server.ready().post(body | {"seed": seed}, TEXT)
            assert (status, json.loads(answer)) == (500, {"error": "no memory left"})
            status, answer = server.post(body | {"seed": seed, "stream": True}, TEXT)
            assert status == 200
            *_, last = answer.strip().split("\n\n")
            assert last == 'data: {"error": "no memory left"}'
        assert server.ask(**ANY).drafts is not None


@pytest.mark.parametrize(
    "after, stream", [(0, False), (0, True), (1, True), (500, True)]
)
def test_clients_may_leave(server, chunks, after, stream):
    body = {"prompt": chunks[46] + "#" * after, "max_tokens": 60, "stream": stream}
    server.leave(after, **body)
    assert server.ask(**ANY).drafts is not None
    assert "Traceback" not in server.log()


# Two hundred requests -----------------------------------------------------------------


def soak(server, chunks, requests, longest):
    """Requests of every kind, one after another; prompts of up to that many pieces.

    Returns:
        Resident memory in kilobytes after each.
    """
    mistakes = cycle(MISTAKES)
    texts, sizes = {}, []

    def good(i):
        body = {"prompt": chunks[i % 7], "max_tokens": 20, "stream": bool(i % 2)}
        reply = server.ask(**body)
        assert texts.setdefault(i % 7, reply.text) == reply.text

    def mistake(i):
        body, code, _ = MISTAKES[next(mistakes)]
        assert server.post(body, TEXT)[0] == code

    def gone(i):
        server.leave(i % 3 * 200, prompt=chunks[i % 9], max_tokens=50, stream=True)

    def one(i):
        reply = server.ask(messages=[user(chunks[i % 11])], max_tokens=1)
        assert reply.finish_reason == "length"

    def stopped(i):
        text = texts.get(0) or good(0) or texts[0]
        start = i % (len(text) // 2)
        server.ask(prompt=chunks[0], max_tokens=20, stop=text[start : start + 5])

    def long(i):
        pieces = longest if i in (9, 49) else 8  # memory is at its height then
        body = {"prompt": "".join(chunks[:pieces]), "max_tokens": 3}
        assert server.ask(**body).usage["prompt_tokens"] > 30 * pieces

    kinds = [good, mistake, gone, one, stopped, good, mistake, stopped, gone, long]
    for i, kind in enumerate(islice(cycle(kinds), requests)):
        kind(i)
        sizes.append(server.rss())
    return sizes


def test_requests_of_every_kind(server, chunks):
    soak(server, chunks, 20, longest=20)
    assert "Traceback" not in server.log()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_requests(chunks, name):
    """No crash, and memory stays what it was. The longest prompt is longer than the
    positions that the model was made for."""
    cache = "--prompt-cache-size", 4
    with Server(*arguments(name), *assistant(name), *cache) as server:
        server.ready()
        sizes = soak(server, chunks, 200, longest=110)
        assert max(sizes[-50:]) < 1.05 * max(sizes[50:100]), sizes


# Other clients ------------------------------------------------------------------------


def test_the_openai_client(server, chunks):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="-")
    body = {"model": "default_model", "messages": [user(chunks[47])], "max_tokens": 20}
    answer = client.chat.completions.create(**body)
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    chunks_ = list(
        client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks_[:-1])
    assert text == answer.choices[0].message.content
    streamed = chunks_[-1].usage.completion_tokens_details
    assert streamed.accepted_prediction_tokens + streamed.rejected_prediction_tokens > 0
    off = client.chat.completions.create(**body, extra_body={"num_draft_tokens": 0})
    assert off.choices[0].message.content == text
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0
    text = client.completions.create(
        model="default_model", prompt=chunks[47], max_tokens=5
    )
    assert text.usage.completion_tokens == 5
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**body | {"model": "no/such"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body, extra_body={"num_draft_tokens": -1})
    assert caught.value.body == "num_draft_tokens must be at least 0"


def example(language, server):
    """The code of docs/apps.md in this language, for this server."""
    page = (Path(__file__).parent.parent / "docs" / "apps.md").read_text()
    [code] = re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)
    assert ":8080" in code
    return code.replace(":8080", f":{server.port}")


def test_the_openai_example(server):
    command = [sys.executable, "-c", example("py", server)]
    run = subprocess.run(command, capture_output=True, text=True)
    text, _, rest = run.stdout.partition("CompletionTokensDetails(accepted_")
    assert run.returncode == 0 and text, run.stderr
    assert rest.endswith(text.removesuffix("\n"))  # without drafts, streamed


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("stream", [False, True])
def test_the_curl_example(server, stream):
    code = example("sh", server)
    if stream:
        code = code.replace("-d '{", '-d \'{"stream": true,')
    run = subprocess.run(["sh", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    body = {"messages": [user("import os")], "max_tokens": 40}
    wanted = server.ask(**body, num_draft_tokens=0).text
    if stream:
        parts = [e["choices"][0]["delta"].get("content") for e in events(run.stdout)]
        assert "".join(part or "" for part in parts) == wanted != ""
    else:
        [choice] = json.loads(run.stdout)["choices"]
        assert choice["message"]["content"] == wanted != ""


# The command --------------------------------------------------------------------------


def start(*more):
    command = [shutil.which("mlx_lm.server", path=str(SCRIPTS)), *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_pair_that_does_not_fit_ends_the_command():
    found = start(*arguments("moe"), *assistant("e"), "--port", 0)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    last = found.stderr.splitlines()[-1]
    assert last.startswith("mlx-lm-mtp: error: ") and "does not fit" in last


def test_flags_that_cannot_be_honoured():
    found = start(*arguments("e"), *assistant("e"), "--kv-bits", 8)
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1
    assert "--kv-bits does not go" in found.stderr
