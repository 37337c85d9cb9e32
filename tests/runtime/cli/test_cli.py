"""The command as a whole: help, verbs, how errors look, exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path

import click
import pytest

from sa3_models import __version__
from sa3_models.catalogue import catalogue
from sa3_models.errors import ArtefactMissing, BuildFailed, MachineMismatch, RunFailed, UsageError
from sa3_runtime.cli import app, ending
from sa3_runtime.cli.app import SECTIONS, VERBS, Verb

HEAVY = ("numpy", "onnx", "onnxruntime", "tensorrt", "cuda", "huggingface_hub", "torch", "PIL")


def test_help_names_every_verb_and_imports_nothing_heavy(script):
    code = (
        "import sys; from sa3_runtime.cli.app import main; main(['--help']); "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = script(code)
    assert done.stderr.strip() == "[]"
    for name in VERBS:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE), name
    for title in SECTIONS:
        assert f"{title}:" in done.stdout


@pytest.mark.parametrize(
    "words", [["generate", "--help"], ["batch", "-h"], ["config", "--help"], ["--nonsense"],
              ["inspect", "-h"], ["play", "-h"], ["bench", "-h"], ["completion", "bash"]],
    ids=" ".join,
)  # fmt: skip
def test_help_and_usage_errors_of_a_verb_import_nothing_heavy(script, words):
    code = (
        f"import sys; from sa3_runtime.cli.app import main; main({words!r}); "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = script(code)
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_help_takes_less_than_four_tenths_of_a_second(spawn):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert spawn("--help").returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.4


def test_version(sa3):
    assert sa3("--version").out == f"sa3 {__version__}\n"


def test_help_of_a_verb_shows_canonical_flags_defaults_and_examples(sa3):
    page = sa3("generate", "--help").out
    for word in ("--model", "--prompt", "--seconds", "--inpaint", "--init-audio", "--out"):
        assert word in page
    for hidden in ("--dit", "--duration", "--cfg-scale", "--inpaint-range", "--mega-graph"):
        assert f"{hidden} " not in page
        assert f"{hidden}," not in page
    assert "[default: 0.7]" in " ".join(page.split())
    assert "What to make:" in page
    assert 'sa3 generate "techno loop' in page


def test_defaults_on_the_help_page_are_those_of_a_request(sa3):
    """Defaults have one place; the page repeats them in words."""
    from sa3_runtime.request import INIT_NOISE_DEFAULT, INIT_NOISE_MIN, SEED_MAX

    page = " ".join(sa3("generate", "--help").out.split())
    assert "[default: the model's, or that of the init audio]" in page
    assert f"{INIT_NOISE_MIN:g} (stay) to 1. [default: {INIT_NOISE_DEFAULT:g}]" in page
    assert SEED_MAX == 2**64 - 1
    steps = sorted({m.steps for m in catalogue().models.values() if m.kind == "generator"})
    assert f"[default: the model's, {' or '.join(map(str, steps))}]" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--secnds", "3"], "there is no option --secnds – did you mean --seconds?"),
        (["--seeds=1", "x", "--nonsense"], "there is no option --nonsense – sa3 --help"),
        (["batch", "a", "--ou-dir", "b"], "there is no option --ou-dir – did you mean --out-dir?"),
        (["batch", "a"], "missing option --out-dir"),
        (["x", "--steps", "abc"], "'abc' is not a valid integer"),
        (["x", "--seed", "1.5"], "'1.5' is not a valid integer"),
        (["x", "--steps"], "requires an argument"),
        (["genrate", "x"], "there is no verb genrate – did you mean generate?"),
        (["biuld"], "did you mean build?"),
        (["download", "medium"], "did you mean pull?"),
        (["ls"], "did you mean list?"),
        (["a", "warm", "pad"], 'the prompt needs quotes: a warm pad – sa3 "a warm pad"'),
        ([], "there is no prompt"),
        (["--seconds", "3"], "there is no prompt"),
        (["completion", "csh"], "'csh' is not one of"),
    ],
)
def test_a_slip_gives_one_line_and_code_2(sa3, words, message):
    """CASES 28: unknown flags and bad values are usage errors: one line on stderr, code 2."""
    ran = sa3(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.startswith("sa3: ")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunFailed("w", found="f", hint="h"), 1), (UsageError("w", found="f", hint="h"), 2),
        (ArtefactMissing("w", found="f", hint="h"), 3),
        (MachineMismatch("w", found="f", hint="h"), 4), (BuildFailed("w", found="f", hint="h"), 5),
    ],
)  # fmt: skip
def test_errors_have_their_exit_code_one_sentence_and_an_object(sa3, monkeypatch, error, code):
    @click.command()
    @click.option("--json", is_flag=True)
    def fails(json):
        raise error

    monkeypatch.setattr(app, "load", lambda name, verb: fails)
    ran = sa3("doctor")
    assert (ran.code, ran.out, ran.err) == (code, "", "sa3: w: f – h\n")
    ran = sa3("doctor", "--json")
    assert ran.objects == [
        {
            "error": {
                "kind": type(error).__name__,
                "what": "w",
                "found": "f",
                "hint": "h",
                "exit_code": code,
            }
        }
    ]
    assert ran.err == "sa3: w: f – h\n"


def failing(error: BaseException) -> click.Command:
    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1)
    def fails(words):
        raise error

    return fails


def test_an_unforeseen_error_is_one_line_with_the_traceback_in_a_file(sa3, monkeypatch):
    monkeypatch.setattr(app, "load", lambda name, verb: failing(ZeroDivisionError("by\nzero")))
    ran = sa3("doctor")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    log = re.search(r"ZeroDivisionError by zero – please report it with (\S+)", ran.err)[1]
    assert "Traceback" in Path(log).read_text()
    verbose = sa3("doctor", "-v")
    assert "Traceback" in verbose.err
    assert verbose.err.splitlines()[-1].startswith("sa3: unforeseen: ZeroDivisionError")


def test_a_fault_without_a_place_for_its_log_is_still_one_line(sa3, monkeypatch):
    def nowhere(*args, **kw):
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(app, "load", lambda name, verb: failing(ZeroDivisionError("by zero")))
    monkeypatch.setattr(ending.tempfile, "NamedTemporaryFile", nowhere)
    ran = sa3("doctor")
    assert ran.err.startswith("sa3: unforeseen: ZeroDivisionError by zero – please report")
    assert len(ran.err.splitlines()) == 1


def test_a_package_that_went_away_is_named_with_the_repair(sa3, monkeypatch):
    """CASES 32: a damaged environment."""
    error = ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")
    monkeypatch.setattr(app, "load", lambda name, verb: failing(error))
    ran = sa3("doctor")
    assert ran.code == 1
    assert ran.err.startswith("sa3: a package is not installed: tokenizers – ./install.sh ")


def test_memory_that_does_not_suffice_is_said(sa3, monkeypatch):
    """CASES 41: a limit on memory."""
    error = MemoryError("Unable to allocate 40.4 MiB")
    monkeypatch.setattr(app, "load", lambda name, verb: failing(error))
    ran = sa3("doctor")
    assert ran.code == 1
    assert ran.err.startswith("sa3: there is not enough memory: Unable to allocate 40.4 MiB – ")


def test_what_the_system_refuses_is_named(sa3, no_loading, tmp_path):
    """CASES 28: a path that no system takes."""
    ran = sa3("x", "--seconds", 1, "-o", tmp_path / ("a/" * 3000) / "x.wav")
    assert ran.code != 0
    assert "too long" in ran.err
    assert "unforeseen" not in ran.err
    assert len(ran.err) < 600


def test_a_home_that_is_refused_is_named_with_its_variable(sa3, monkeypatch, tmp_path):
    """CASES 28: nobody gave that folder on the command line."""
    for path, hinted in ((tmp_path / "home" / "onnx", True), (tmp_path / "clip.wav", False)):
        error = OSError(errno.EROFS, "Read-only file system", str(path))
        monkeypatch.setattr(app, "load", lambda name, verb, error=error: failing(error))
        ran = sa3("doctor")
        assert ran.code == 1
        assert f"{path}: Read-only file system" in ran.err
        assert ("set SA3_HOME" in ran.err) == hinted


def test_interrupting_gives_130(sa3, monkeypatch):
    """CASES 28: Ctrl-C."""
    monkeypatch.setattr(app, "load", lambda name, verb: failing(KeyboardInterrupt()))
    ran = sa3("doctor", "--json")
    assert ran.code == 130
    assert ran.objects[0]["error"]["exit_code"] == 130
    assert "interrupted" in ran.err


@pytest.mark.parametrize(
    ("home", "message"),
    [
        ("sa3_runtime.cli.absent:x", "the verb v is not part of this installation"),
        ("absent_package.cli:x", "the verb v is not part of this installation"),
        ("sa3_runtime.cli.app:absent", "the verb v is not part of this installation"),
        ("sa3_runtime.cli.app:VERBS", "the verb v is not part of this installation"),
    ],
)
def test_a_verb_that_is_not_there_says_so(home, message):
    with pytest.raises(RunFailed, match=message):
        app.load("v", Verb(home, ""))


def test_a_verb_whose_package_is_missing_names_what_to_install(monkeypatch):
    def absent(module):
        raise ModuleNotFoundError("No module named 'onnx_graphsurgeon'", name="onnx_graphsurgeon")

    monkeypatch.setattr(app, "import_module", absent)
    with pytest.raises(RunFailed, match=r"onnx_graphsurgeon – pip install 'sa3-trt\[export\]'"):
        app.load("export", VERBS["export"])


def test_every_verb_of_this_package_is_there():
    for name, verb in VERBS.items():
        if verb.home.startswith("sa3_runtime."):
            assert isinstance(app.load(name, verb), click.Command), name


def test_the_verb_may_be_left_out(sa3, stub):
    by_word = sa3("generate", "x", "-m", stub, "--seconds", 0.1, "--seed", 1, "--json")
    bare = sa3("x", "-m", stub, "--seconds", 0.1, "--seed", 1, "--json")
    flags = sa3("--json", "-m", stub, "--prompt", "x", "--seconds", 0.1, "--seed", 1)
    hashes = {ran.objects[0]["pcm_sha256"] for ran in (by_word, bare, flags)}
    assert len(hashes) == 1


@pytest.mark.parametrize("word", ["rain", "shower", "bell", "pulse", "explosion", "Build"])
def test_words_that_merely_look_like_verbs_are_prompts(sa3, stub, word):
    ran = sa3(word, "-m", stub, "--seconds", 0.1, "--dry-run", "--json")
    assert ran.objects[0]["request"]["prompt"] == word


def test_help_and_version_without_dashes(sa3):
    assert sa3("help").out == sa3("--help").out
    assert sa3("help", "batch").out == sa3("batch", "--help").out
    assert sa3("version").out == sa3("--version").out


def test_a_prompt_after_two_dashes_may_be_anything(sa3, stub):
    ran = sa3("generate", "-m", stub, "--seconds", 0.1, "--json", "--", "--help")
    assert ran.objects[0]["request"]["prompt"] == "--help"
    ran = sa3("-m", stub, "--seconds", 0.1, "--json", "--prompt", "-loud noise")
    assert ran.objects[0]["request"]["prompt"] == "-loud noise"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_program(sa3, spawn, shell):
    script = sa3("completion", shell).out
    assert "_SA3_COMPLETE" in script
    asked = {
        "bash": {"COMP_WORDS": "sa3 gen", "COMP_CWORD": "1"},
        "zsh": {"COMP_WORDS": "sa3 gen", "COMP_CWORD": "1"},
        "fish": {"COMP_WORDS": "sa3 gen", "COMP_CWORD": "gen"},
    }[shell]
    done = spawn(env={"_SA3_COMPLETE": f"{shell}_complete", **asked})
    assert b"generate" in done.stdout


@pytest.mark.parametrize("words", ["sa3 generate --init", "sa3 --init", "sa3 rain --init"])
def test_completion_knows_flags(spawn, words):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = spawn(env={"_SA3_COMPLETE": "bash_complete", **asked})
    assert set(done.stdout.split()) == {b"plain,--init-audio", b"plain,--init-noise-level"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sa3 generate --model small-m", {b"plain,small-music", b"plain,small-music-base"}),
        ("sa3 generate -m ./some", {b"dir,./some"}),
        ("sa3 generate --sampler p", {b"plain,pingpong"}),
        ("sa3 generate --format wav2", {b"plain,wav24"}),
        ("sa3 --init-audio ta", {b"file,ta"}),
        ("sa3 generate --device c", {b"plain,cpu", b"plain,cuda"}),
    ],
)
def test_completion_knows_values(spawn, words, expected):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = spawn(env={"_SA3_COMPLETE": "bash_complete", **asked})
    assert set(done.stdout.split()) == expected


def test_config_shows_values_and_sources(sa3, own_place, monkeypatch):
    (own_place / "config" / "sa3").mkdir(parents=True)
    (own_place / "config" / "sa3" / "config.toml").write_text(
        'model = "medium"\nsteps = 12\nthreads = 3\nhome = "~/elsewhere"\n'
    )
    monkeypatch.setenv("SA3_STEPS", "16")
    monkeypatch.delenv("SA3_HOME")
    settings = sa3("config", "--json").objects[0]["settings"]
    got = {name: (entry["value"], entry["source"]) for name, entry in settings.items()}
    file = str(own_place / "config" / "sa3" / "config.toml")
    assert got["model"] == ("medium", file)
    assert got["steps"] == (16, "SA3_STEPS")
    assert got["threads"] == (3, file)
    assert got["home"] == ("~/elsewhere", file)
    assert got["seconds"] == (30.0, "catalogue")
    assert got["sampler"] == ("pingpong", "catalogue")
    assert got["offline"] == (False, "default")
    assert sa3("config", "--json", "-m", "demo").objects[0]["settings"]["model"] == {
        "value": "demo", "source": "flag", "variable": "SA3_MODEL",
    }  # fmt: skip
    lines = sa3("config").out.splitlines()
    assert any(line.split()[:3] == ["steps", "16", "SA3_STEPS"] for line in lines)


def test_settings_reach_the_request_and_flags_win(sa3, stub, own_place, monkeypatch):
    (own_place / "config" / "sa3").mkdir(parents=True)
    (own_place / "config" / "sa3" / "config.toml").write_text(
        f"model = {json.dumps(str(stub))}\nsteps = 2\nseconds = 0.1\n"
    )
    request = sa3("x", "--json").objects[0]["request"]
    assert (request["steps"], request["seconds"]) == (2, 0.1)
    assert os.environ["SA3_MODEL"] == str(stub)  # for the verbs of other packages
    monkeypatch.setenv("SA3_STEPS", "3")
    assert sa3("x", "--json").objects[0]["request"]["steps"] == 3
    assert sa3("x", "--json", "--steps", 4).objects[0]["request"]["steps"] == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepz = 3\n", "unknown setting: stepz in "),
        ('steps = "many"\n', "steps must be a whole number: 'many' in "),
        ("steps = 3.5\n", "steps must be a whole number: 3.5 in "),
        ("= nonsense", "the settings file cannot be read"),
    ],
)
def test_a_wrong_settings_file_is_named(sa3, own_place, content, message):
    (own_place / "config" / "sa3").mkdir(parents=True)
    (own_place / "config" / "sa3" / "config.toml").write_text(content)
    for words in (["config"], ["x"]):
        ran = sa3(*words)
        assert ran.code == 2
        assert message in ran.err
        assert "config.toml" in ran.err


def test_a_wrong_variable_is_named(sa3, monkeypatch):
    monkeypatch.setenv("SA3_THREADS", "two")
    ran = sa3("x")
    assert ran.code == 2
    assert "threads must be a whole number: 'two' in SA3_THREADS" in ran.err


def test_the_home_of_the_settings_file_holds_for_every_verb(sa3, own_place, monkeypatch):
    (own_place / "config" / "sa3").mkdir(parents=True)
    (own_place / "config" / "sa3" / "config.toml").write_text(f'home = "{own_place}/there"\n')
    monkeypatch.delenv("SA3_HOME")
    ran = sa3("x", "-m", "small-music")
    assert ran.code == 3
    assert f"{own_place}/there" in ran.err


def test_the_objects_of_every_verb_are_in_the_docs(sa3, stub, own_place, data):
    docs = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    (own_place / "jobs.jsonl").write_text('{"prompt": "x", "seconds": 0.1}')
    clip = sa3("x", "-m", stub, "--seconds", 0.1).paths[0]
    runs = (
        ["batch", "jobs.jsonl", "-m", stub, "-o", "clips", "--json"],
        ["inspect", clip, "--json"],
        ["config", "--json"],
        ["bench", "-m", stub, "--seconds", "0.1", "--repeat", 1, "--json"],
        ["list", "--json"],
        ["show", stub, "--json"],
        ["verify", stub, "--json"],
        ["doctor", "--offline", "--json"],
        ["export", data / "tiny-music", "--dry-run", "--json"],
    )
    for words in runs:
        objects = sa3(*words).objects
        assert objects, words
        for key in {key for found in objects for key in found}:
            assert f"`{key}`" in docs, f"{words[0]}: docs/cli.md does not describe {key}"


def test_messages_propose_commands_as_the_person_types_them(sa3, monkeypatch):
    monkeypatch.setenv("SA3_PROGRAM", "./sa3")
    assert "./sa3 pull small-music" in sa3("generate", "x", "-m", "small-music").err
    monkeypatch.delenv("SA3_PROGRAM")
    assert " sa3 pull small-music" in sa3("generate", "x", "-m", "small-music").err


def test_inspect_proposes_the_command_as_the_person_types_it(clip, sa3, monkeypatch):
    path = clip("x", "-o", "a.wav").paths[0]
    monkeypatch.setenv("SA3_PROGRAM", "./sa3")
    assert f'repeat it: ./sa3 --from "{path}"' in sa3("inspect", path).out
