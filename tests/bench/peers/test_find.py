"""Which peers are found and how they are started: programs that stand in for libraries, with the names used of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llm_worker_bench.peers import find, suite
from llm_worker_bench.peers.plan import Plan
from llm_worker_bench.peers.programs import OURS, PeerError
from llm_worker_bench.results import Recorder
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.weights import open_checkpoint

from .test_programs import fake as fake
from .test_programs import program
from .test_programs import tiny as tiny

NOTE = """
import json, os, time, types
def note(*what):
    with open({log!r}, "a") as file:
        print(json.dumps(what), file=file)
"""
# What is used of mistralrs: a token is a character.
MISTRALRS = (
    NOTE
    + """
class Which:
    class GGUF:
        def __init__(self, quantized_model_id, quantized_filename):
            if quantized_filename == "unreadable.gguf":
                raise ValueError("unknown GGUF type 42\\n   0: a frame\\n   1: another")
            note(quantized_filename, os.environ["RAYON_NUM_THREADS"])
def request(prompt, model, *, stream=False, **options):
    note(len(prompt), sorted(options.items()))
    return types.SimpleNamespace(prompt=prompt, tokens=options["max_tokens"])
CompletionRequest = ChatCompletionRequest = request
class Runner:
    def __init__(self, which, max_seqs, prefix_cache_n, token_source):
        note(max_seqs, prefix_cache_n, token_source)
    def tokenize_text(self, text, add_special_tokens, enable_thinking): return list(range(len(text)))
    def detokenize_text(self, ids, skip_special_tokens): return "x" * len(ids)
    def send_completion_request(self, one):
        usage = dict(prompt_tokens=len(one.prompt), completion_tokens=one.tokens, total_completion_time_sec=0.5)
        return types.SimpleNamespace(usage=types.SimpleNamespace(**usage))
    def send_chat_completion_request(self, one):
        for _ in range(one.tokens):
            time.sleep(0.001)  # a token takes a while
            yield object()
"""
)
# What is used of vLLM: a step makes a token for each request.
VLLM = (
    NOTE
    + """
__version__ = "0.0.test"
SamplingParams = lambda **options: note(sorted(options.items())) or options["max_tokens"]
class Engine:
    model_config = types.SimpleNamespace(dtype="bfloat16", quantization="gguf", get_vocab_size=lambda: 9)
    def __init__(self): self.waiting = {{}}
    def add_request(self, name, prompt, tokens):
        note(name, len(prompt["prompt_token_ids"]))
        self.waiting[name] = [0, tokens]
    def has_unfinished_requests(self): return bool(self.waiting)
    def step(self):
        time.sleep(0.001)
        for name, (made, tokens) in list(self.waiting.items()):
            self.waiting[name][0] += 1
            if made + 1 == tokens:
                del self.waiting[name]
            output = types.SimpleNamespace(token_ids=[1] * (made + 1))
            yield types.SimpleNamespace(request_id=name, outputs=[output])
class LLM:
    def __init__(self, **options):
        note(sorted(options.items()), os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"])
        self.llm_engine = Engine()
"""
)


def python_with(folder: Path, package: str, source: str) -> str:
    """Return an interpreter that finds a package."""
    (folder / f"{package}.py").write_text(source.format(log=str(folder / "log")))
    metadata = folder / f"{package}-0.0.test.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.test\n")
    return str(program(folder / "python", f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n'))


def notes(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def measure(model: Path, plan: Plan) -> Recorder:
    recorder = Recorder("peers")
    suite.run(recorder, lambda *_: None, model, plan)
    return recorder


def test_mistralrs_gets_the_same_tasks(tiny: Path, tmp_path: Path) -> None:
    python = python_with(tmp_path, "mistralrs", MISTRALRS)
    plan = Plan(pp=[16], tg=[160], batches=[1, 2], repetitions=1, threads=2, peers=["mistral.rs"], pythons=[python])
    recorder = measure(tiny, plan)
    found = {result.name: result for result in recorder.results()}
    assert set(found) == {f"{test}/{peer}" for test in ("pp16", "tg160", "tg160@b2") for peer in (OURS, "mistral.rs")}
    theirs = found["tg160/mistral.rs"]
    assert theirs.fields["version"] == "0.0.test (Candle)"
    assert theirs.estimate == pytest.approx(159 / 0.5)  # its own time, from the first token on
    assert 0 < found["tg160@b2/mistral.rs"].estimate <= 2 * 1000
    assert recorder.details["peers"]["mistral.rs"]["settings"] == {
        "threads": 2, "dtype": "auto", "max_seqs": 2, "prefix_cache_n": 0,
    }  # fmt: skip
    opened, runner, *requests = notes(tmp_path)
    assert (opened, runner) == (["tiny.gguf", "2"], [2, 0, "none"])
    options = lambda tokens: [["ignore_eos", True], ["max_tokens", tokens], ["temperature", 0.0]]  # noqa: E731
    lengths = [len(ids) for ids in plan.tasks(open_checkpoint(tiny))[-1].prompts]
    run = [[16, options(1)], [1, options(160)], *([length, options(160)] for length in lengths)]
    assert requests == [run[0], [1, options(8)], *run[2:], *run]  # warming up, then the run


def test_mistralrs_error_is_its_first_line(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "unreadable.gguf"
    model.write_bytes(tiny.read_bytes())
    python = python_with(tmp_path, "mistralrs", MISTRALRS)
    recorder = measure(model, Plan(pp=[4], tg=[0], repetitions=1, peers=["mistral.rs"], pythons=[python]))
    assert recorder.details["failed"] == {"mistral.rs": "mistral.rs: ValueError: unknown GGUF type 42"}


def test_vllm_gets_the_same_tasks(tiny: Path, tmp_path: Path) -> None:
    python = python_with(tmp_path, "vllm", VLLM)
    plan = Plan(pp=[16], tg=[160], batches=[1, 2], repetitions=1, peers=["vllm"], pythons=[python])
    recorder = measure(tiny, plan)
    found = {result.name: result for result in recorder.results()}
    assert {name for name in found if name.endswith("/vllm")} == {"pp16/vllm", "tg160/vllm", "tg160@b2/vllm"}
    assert found["pp16/vllm"].fields["version"] == "0.0.test"
    assert 0 < found["tg160@b2/vllm"].estimate <= 2 * 1000
    (options, in_process), *requests = notes(tmp_path)  # type: ignore[misc]
    prompts = plan.tasks(open_checkpoint(tiny))[-1].prompts
    assert dict(options) == {
        "model": str(tiny), "skip_tokenizer_init": True, "max_model_len": 161 + max(map(len, prompts)),
        "max_num_seqs": 2, "enable_prefix_caching": False, "seed": 0,
    }  # fmt: skip
    assert in_process == "0"
    sampling = lambda tokens: [[  # noqa: E731
        ["detokenize", False], ["ignore_eos", True], ["max_tokens", tokens], ["temperature", 0.0],
    ]]  # fmt: skip
    assert requests[:4] == [sampling(1), ["0", 16], sampling(8), ["1", 1]]
    assert requests[-3:] == [sampling(160), *([str(6 + n), len(ids)] for n, ids in enumerate(prompts))]


def test_peers_that_cannot_run_are_left_out(
    tiny: Path, tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where mistral.rs may be installed
    bare = str(program(tmp_path / "python", "#!/bin/sh\nexit 1\n"))
    checkpoint, left_out = open_checkpoint(tiny), dict[str, str]()
    plan = Plan(pp=[4], pythons=[bare], llama_bench=fake, llama_bench_args=["-fa off"], device="cuda")
    found = find.find_peers(tiny, checkpoint, plan, plan.tasks(checkpoint), left_out)
    assert [peer.name for peer in found] == ["llama-bench", "llama-bench -fa off"]
    assert left_out.pop("vllm").startswith(f"vllm not installed for {bare}, ")
    assert left_out == dict.fromkeys(("llama-cpp-python", "transformers", "mistral.rs"), "it is run on the CPU only")
    plan = Plan(pp=[4], pythons=[bare], peers=["mistral.rs"])
    find.find_peers(tiny, checkpoint, plan, plan.tasks(checkpoint), left_out)
    assert left_out["mistral.rs"].endswith(": --peer-python PATH names another, --install mistral.rs installs it")


# Stands in for the interpreter that makes an environment: the one it makes finds the package once pip was called.
MAKER = """#!/bin/sh
echo "$@" >> {log}
[ "$2" = venv ] || exit 1
mkdir -p "$4/bin"
printf '#!/bin/sh\\necho "$@" >> {log}\\nif [ "$2" = pip ]; then {pip}; fi\\n[ -e {log}.done ]\\n' > "$4/bin/python"
chmod +x "$4/bin/python"
"""


def test_install_makes_an_environment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log, seen = tmp_path / "log", list[str]()
    maker = program(tmp_path / "maker", MAKER.format(log=log, pip=f"touch {log}.done"))
    monkeypatch.setattr(find.sys, "executable", str(maker))
    python = find.install("mistral.rs", lambda what, *_: seen.append(what))
    assert python == str(find.environment_python("mistral.rs"))
    assert Path(python).is_relative_to(tmp_path / "cache")
    assert log.read_text().splitlines() == [f"-m venv --clear {Path(python).parents[1]}", "-m pip install -q mistralrs"]
    assert seen[1] == "installing mistralrs"
    assert find.install("mistral.rs", lambda what, *_: seen.append(what)) == python
    assert len(seen) == 2


def test_install_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    maker = program(
        tmp_path / "maker", MAKER.format(log=tmp_path / "log", pip="echo No matching distribution >&2; exit 1")
    )
    monkeypatch.setattr(find.sys, "executable", str(maker))
    with pytest.raises(PeerError, match=r"^installing mistralrs ended with exit status 1: No matching distribution$"):
        find.install("mistral.rs", lambda *_: None)
    with pytest.raises(InvalidRequestError, match=r"--install vllm: only mistral\.rs can be installed"):
        find.install("vllm", lambda *_: None)
