"""Plain mlx-lm stays what it is; MTP comes and goes whole."""

import argparse
import importlib
import importlib.metadata
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import PAIRS

import mlx_lm_mtp
from mlx_lm_mtp import MTPError, disable, enable, status
from mlx_lm_mtp.host import flags
from mlx_lm_mtp.host.server import Processors, Serving

generate_module = importlib.import_module("mlx_lm.generate")
NAMES = ["generate", "load", "main", "setup_arg_parser", "stream_generate"]


@pytest.fixture(autouse=True)
def enabled_again():
    enable()
    yield
    enable()


def bindings():
    return {n: getattr(generate_module, n) for n in NAMES} | {
        "package": (mlx_lm.generate, mlx_lm.stream_generate),
        "models": list(mlx_lm.models.__path__),
    }


def test_disable_restores_identity_and_enable_returns():
    with_mtp = bindings()
    disable()
    without = bindings()
    assert all(with_mtp[n] is not without[n] for n in NAMES)
    assert all(with_mtp[n].__wrapped__ is without[n] for n in NAMES)
    assert mlx_lm.stream_generate is generate_module.stream_generate
    disable()
    assert bindings() == without
    enable()
    again = bindings()
    enable()
    assert bindings() == again and again != without
    disable()
    assert bindings() == without


def test_status_tells_what_is_patched():
    found = status()
    assert found["enabled"] and found["tested"] and found["reason"] is None
    assert "mlx_lm.generate.stream_generate" in found["patched"]
    assert found["mlx_lm"] == mlx_lm.__version__
    disable()
    assert not status()["enabled"] and status()["patched"] == []


def test_a_reloaded_module_is_patched_again():
    importlib.reload(generate_module)
    assert hasattr(generate_module.stream_generate, "__wrapped__")
    disable()
    assert not hasattr(generate_module.stream_generate, "__wrapped__")


def test_an_unknown_version_is_left_alone(monkeypatch):
    disable()
    before = bindings()
    monkeypatch.setattr(mlx_lm, "__version__", "0.99.0")
    with pytest.raises(MTPError, match=r"mlx-lm 0\.99\.0 is not one") as told:
        enable()
    assert str(told.value).count("0.99.0") == 1  # once for all modules
    assert bindings() == before and not status()["enabled"]


@pytest.mark.parametrize("name", [*NAMES, "speculative_generate_step"])
def test_a_renamed_internal_is_left_alone(monkeypatch, name):
    disable()
    monkeypatch.delattr(generate_module, name)
    before = {k: v for k, v in vars(generate_module).items() if k in NAMES}
    with pytest.raises(MTPError, match=rf"has no mlx_lm\.generate\.{name}"):
        enable()
    assert {k: v for k, v in vars(generate_module).items() if k in NAMES} == before


COMMANDS = ("chat", "benchmark", "server")


def everything():
    """Every function, class and method of the commands' modules."""
    modules = [importlib.import_module(f"mlx_lm.{name}") for name in COMMANDS]
    found = {(m.__name__, n): v for m in modules for n, v in vars(m).items()}
    classes = [v for v in found.values() if isinstance(v, type)]
    return found | {(c.__name__, n): v for c in classes for n, v in vars(c).items()}


def test_the_commands_come_and_go_whole():
    with_mtp = everything()
    disable()
    without = everything()
    assert not any("mlx_lm_mtp" in repr(v) for v in without.values())
    changed = {key for key, value in with_mtp.items() if without[key] is not value}
    assert ("mlx_lm.chat", "stream_generate") in changed
    assert ("mlx_lm.benchmark", "load") in changed
    assert ("APIHandler", "do_POST") in changed
    enable()
    assert {k for k, v in everything().items() if without[k] is not v} == changed
    disable()
    assert everything() == without


@pytest.mark.parametrize(
    "owner, name",
    [
        ("chat", "load"),
        ("server", "BatchGenerator"),
        ("server.ModelProvider", "load"),
        ("server.APIHandler", "completion_usage_response"),
    ],
)
def test_a_command_with_a_renamed_internal_is_left_alone(monkeypatch, owner, name):
    everything()
    disable()
    home, _, inner = owner.partition(".")
    module = importlib.import_module(f"mlx_lm.{home}")
    monkeypatch.delattr(getattr(module, inner) if inner else module, name)
    before = everything()
    with pytest.raises(MTPError, match=rf"has no mlx_lm\.{owner}\.{name}: report"):
        enable()
    assert everything() == before


@pytest.mark.parametrize("name", ["cache_prompt", "convert", "fuse", "lora"])
def test_other_commands_are_not_touched(name):
    importlib.import_module(f"mlx_lm.{name}")
    enable()
    homes = {key.split(".")[1] for key in status()["patched"]}
    assert homes <= {"generate", *COMMANDS}


def test_only_generates_own_names_are_followed():
    """``load`` is another module's, which others take from there."""
    from mlx_lm import fuse, lora

    assert hasattr(generate_module.load, "__wrapped__")
    for load in (mlx_lm.load, mlx_lm.utils.load, fuse.load, lora.load):
        assert load is generate_module.load.__wrapped__


def test_a_fault_of_ours_does_not_reach_ordinary_draft_models():
    code = (
        "import sys, mlx_lm; sys.modules['mlx_lm_mtp.pair'] = None;"
        "sys.modules['mlx_lm_mtp.generate'] = None;"
        "step = sys.modules['mlx_lm.generate'].speculative_generate_step;"
        "print(hasattr(step, '__wrapped__'), type(step(None, None, object(), None)))"
    )
    assert python(code) == (0, "True <class 'generator'>\n", "")


def test_an_ordinary_draft_model_takes_mlx_lms_own_path(monkeypatch):
    disable()
    calls = []

    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return iter(())

    monkeypatch.setattr(generate_module, "speculative_generate_step", original)
    enable()
    generate_module.speculative_generate_step(1, 2, "draft", 3, num_draft_tokens=4)
    assert calls == [((1, 2, "draft", 3), {"num_draft_tokens": 4})]


# A fresh interpreter ------------------------------------------------------------------


def python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    return run.returncode, run.stdout, run.stderr


def test_start_up_imports_nothing_and_says_nothing():
    code = (
        "import sys; loaded = set(sys.modules);"
        "print(sorted(m for m in loaded if 'mlx' in m))"
    )
    assert python(code) == (0, "['mlx_lm_mtp', 'mlx_lm_mtp.host']\n", "")


def test_start_up_loads_only_the_hook():
    """What it loads is what it costs: typing alone would be ten milliseconds."""
    home = os.path.dirname(os.path.dirname(mlx_lm_mtp.__file__))
    code = (
        f"import os, sys; sys.path.insert(0, {home!r}); before = set(sys.modules);"
        "from mlx_lm_mtp.host import activate; activate();"
        "print(sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True
    )
    assert run.stdout == "['mlx_lm_mtp', 'mlx_lm_mtp.host']\n", run.stderr


def test_importing_the_package_changes_nothing():
    code = (
        "import sys, mlx_lm_mtp; print([m for m in sys.modules if m[:6] == 'mlx.co'])"
    )
    assert python(code) == (0, "[]\n", "")


def test_the_off_switch():
    code = (
        "import mlx_lm, mlx_lm_mtp; s = mlx_lm_mtp.status();"
        "wrapped = hasattr(mlx_lm.stream_generate, '__wrapped__');"
        "print(s['enabled'], s['patched'], wrapped)"
    )
    assert python(code, MLX_LM_MTP_DISABLE="1") == (0, "False [] False\n", "")
    code, out, _ = python(code, MLX_LM_MTP_DISABLE="0")
    assert out.startswith("True")


BREAK = """
import importlib.util, sys, types
sys.argv = ['mlx_lm.generate', *{argv}]
{fault}
import mlx_lm
from mlx_lm.generate import setup_arg_parser, stream_generate
print('wrapped', hasattr(stream_generate, '__wrapped__'))
print(setup_arg_parser().parse_args([]).num_draft_tokens)
"""
FAULTS = {
    "an exception while patching": (
        "import mlx_lm_mtp.host.patch as p\n"
        "def apply(module): raise RuntimeError('broken')\n"
        "p.apply = apply"
    ),
    "another version": (
        "import mlx_lm_mtp.host.patch as p\np.version = lambda: '1.0.0'"
    ),
    "our code does not import": "sys.modules['mlx_lm_mtp.host.patch'] = None",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_breaks_mlx_lm_works_silently(fault):
    code = BREAK.format(argv=[], fault=FAULTS[fault])
    assert python(code) == (0, "wrapped False\n3\n", "")


@pytest.mark.parametrize("fault", FAULTS)
def test_asking_for_mtp_then_says_why_not(fault):
    code = BREAK.format(argv=["--mtp-assistant", "x"], fault=FAULTS[fault])
    code += "import mlx_lm.chat, mlx_lm.server"
    returned, _, err = python(code)
    assert returned == 0
    assert err.startswith("mlx-lm-mtp: error: --mtp-assistant is not available: ")
    assert len(err.splitlines()) == 1  # once for all modules


def test_upstreams_own_flag_wins():
    fault = """
import argparse
plain = argparse.ArgumentParser.parse_args
import mlx_lm.generate
g = sys.modules['mlx_lm.generate']
def setup_arg_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument('--mtp-assistant', default='theirs')
    parser.add_argument('--num-draft-tokens', type=int, default=3)
    return parser
from mlx_lm_mtp.host import flags
parser = setup_arg_parser()
flags.add(parser)
print(parser.parse_args([]))
"""
    _, out, err = python("import sys" + fault)
    assert out == "Namespace(mtp_assistant='theirs', num_draft_tokens=3)\n", err


def test_upstreams_own_model_file_wins_in_mlx_lm(tmp_path):
    """mlx_lm.load takes theirs, load_assistant still ours."""
    theirs = tmp_path / "gemma4_assistant.py"
    theirs.write_text("class Model: pass\nclass ModelArgs: pass\n")
    code = (
        f"import mlx_lm.models; mlx_lm.models.__path__.insert(0, {str(tmp_path)!r});"
        "from mlx_lm.utils import _get_classes;"
        "from mlx_lm_mtp.pair import model_file;"
        "found = _get_classes({'model_type': 'gemma4_assistant'})[0];"
        "ours = model_file().Model;"
        "print(hasattr(found, 'candidates'), hasattr(ours, 'candidates'))"
    )
    assert python(code) == (0, "False True\n", "")


def test_public_names_are_there():
    assert set(mlx_lm_mtp.__all__) <= set(dir(mlx_lm_mtp))
    for name in mlx_lm_mtp.__all__:
        assert getattr(mlx_lm_mtp, name) is not None
    with pytest.raises(AttributeError):
        mlx_lm_mtp.nothing  # noqa: B018


# Apps that only know mlx-lm -----------------------------------------------------------


def test_an_app_keeps_its_progress_callback(pair_e):
    seen, stats = [], mlx_lm_mtp.MTPStats()
    steps = mlx_lm.stream_generate(
        pair_e.model,
        pair_e.tokenizer,
        "import os\n" * 20,
        max_tokens=20,
        draft_model=pair_e.drafter,
        num_draft_tokens=3,
        prompt_progress_callback=lambda *a: seen.append(a),
        prefill_step_size=30,
        stats=stats,
    )
    responses = list(steps)
    total = responses[-1].prompt_tokens
    assert seen[0] == (0, total) and (30, total) in seen and seen[-1] == (total, total)
    assert any(r.from_draft for r in responses) and stats.rounds > 0


def test_an_app_may_give_input_embeddings(pair_e):
    model, tokenizer = pair_e.loaded
    tokens = tokenizer.encode("import os\nimport sys\n")
    embeddings = model.language_model.model.embed_tokens(mx.array(tokens)) * 1.01
    options = {"input_embeddings": embeddings, "max_tokens": 20}

    def text(**more):
        steps = mlx_lm.stream_generate(model, tokenizer, tokens, **options, **more)
        return [r.token for r in steps]

    assert text(draft_model=pair_e.drafter) == text()


def test_generate_takes_a_drafter_by_position_too(pair_e):
    model, tokenizer = pair_e.loaded
    wanted = mlx_lm.generate(model, tokenizer, "import os", max_tokens=12)
    found = "".join(
        r.text
        for r in mlx_lm.stream_generate(
            model, tokenizer, "import os", 12, pair_e.drafter
        )
    )
    assert found == wanted


def test_a_stop_token_inside_a_draft_ends_the_text(pair):
    case = np.load(PAIRS / pair.name / "eos_case.npz")
    steps = mlx_lm.stream_generate(
        pair.model,
        pair.tokenizer,
        case["prompt"].tolist(),
        max_tokens=100,
        draft_model=pair.drafter,
        num_draft_tokens=8,
    )
    responses = list(steps)
    assert responses[-1].finish_reason == "stop"
    # stream_generate repeats nothing: its last response carries the stop token.
    assert [r.token for r in responses] == case["greedy"].tolist()


def test_a_text_that_ends_at_once_says_so(pair_e, caplog):
    model, tokenizer = pair_e.loaded
    options = {"max_tokens": 1, "draft_model": pair_e.drafter}
    mlx_lm.generate(model, tokenizer, "import os", **options)
    assert "was not used: the text ended before" in caplog.text
    caplog.clear()
    mlx_lm.generate(model, tokenizer, "import os", num_draft_tokens=0, **options)
    assert caplog.text == ""


def hook():
    [found] = [f for f in sys.meta_path if type(f).__module__ == "mlx_lm_mtp.host"]
    return found


def test_the_hook_finds_what_the_others_find(monkeypatch):
    assert hook().find_spec("mlx_lm.chat", ["/nowhere"]) is None
    # A loader of another kind: there is no moment to patch at.
    spec = ModuleSpec("mlx_lm.chat", loader=None)
    other = SimpleNamespace(find_spec=lambda *_: spec)
    monkeypatch.setattr(sys, "meta_path", [hook(), other])
    assert hook().find_spec("mlx_lm.chat") is spec


def test_what_another_tool_put_on_top_stays(monkeypatch):
    monkeypatch.setattr(generate_module, "load", lambda: "another tool's")
    disable()
    assert generate_module.load() == "another tool's"


def test_the_version_before_mlx_lm_is_imported(monkeypatch):
    version = mlx_lm.__version__
    monkeypatch.delitem(sys.modules, "mlx_lm")
    assert status()["mlx_lm"] == version
    disable()  # and nothing is to be put back

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = status()
    assert found["mlx_lm"] is None and not found["tested"]
    monkeypatch.undo()


def parse(*arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    flags.add(parser)
    return parser.parse_args(arguments)


def test_auto_waits_for_a_model_that_requests_name():
    assert parse("--mtp-assistant", "auto").draft_model == "auto"


def test_a_number_for_an_ordinary_draft_model_is_mlx_lms():
    parsed = generate_module.setup_arg_parser().parse_args(["--num-draft-tokens", "2"])
    assert parsed.num_draft_tokens == 2 and parsed.draft_model is None


def test_several_machines_are_refused(monkeypatch, capsys):
    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(mx.distributed, "init", lambda: group)
    with pytest.raises(SystemExit) as left:
        parse("--mtp-assistant", str(PAIRS / "e/assistant"))
    assert left.value.code == 2
    assert "start it without mlx.launch" in capsys.readouterr().err


def provider(**attributes):
    """mlx-lm's model provider of a server that was started without an assistant."""
    from mlx_lm.server import ModelProvider

    self = ModelProvider.__new__(ModelProvider)
    self.draft_model, self.is_distributed = None, False
    self._model_map = {"default_model": "x"}
    self._draft_model_map, self._adapter_map = {"default_model": None}, {}
    vars(self).update(attributes)
    return self


def test_a_request_cannot_bring_an_assistant_to_several_machines():
    models = provider(is_distributed=True)
    with pytest.raises(MTPError, match="an assistant runs on one machine"):
        models.load("default_model", None, str(PAIRS / "e/assistant"))


def test_an_app_that_serves_gets_the_error_and_lives():
    """Only the command ends over a pair that does not fit."""
    models = provider(is_distributed=True)
    models._draft_model_map["default_model"] = flags.AssistantPath.of("x")
    with pytest.raises(MTPError, match="an assistant runs on one machine"):
        models.load_default()


def test_what_a_batch_cannot_honour_reaches_its_client():
    def insert_segments(**options):
        raise ValueError("too many drafts")

    generator = SimpleNamespace(
        insert_segments=insert_segments, next=lambda: ([], []), fresh_cache=list
    )
    serving, processors = Serving(generator), Processors()
    processors.drafts = None
    [uid] = serving.insert_segments(logits_processors=[processors])
    [told], [response] = serving.next()
    assert (told.uid, str(told.progress)) == (uid, "too many drafts")
    assert (response.uid, response.finish_reason) == (uid, "stop")
    assert serving.next() == ([], [])
