"""Runs as JSON: the round trip, files that are refused, and atomic writes."""

from __future__ import annotations

import ast
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_bench import results, statistics
from llm_worker_bench.results import (
    SCHEMA,
    SCHEMA_VERSION,
    Recorder,
    Result,
    ResultsError,
    Run,
    replace_non_finite,
)
from tests.helpers.bench_runs import micro

DOCUMENT = Path(__file__).parents[2] / "docs" / "saved-runs.md"
TEXT = st.text(max_size=20)
NUMBER = st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUE = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | NUMBER | TEXT
OBJECT = st.dictionaries(
    TEXT, VALUE | st.lists(VALUE, max_size=3) | st.dictionaries(TEXT, VALUE, max_size=3), max_size=4
)
OWN = {"name", "unit", "estimate", "low", "high", "better", "samples", "backend"}
RESULT = st.builds(
    Result,
    TEXT, TEXT, NUMBER, NUMBER, NUMBER,
    st.sampled_from(["lower", "higher"]),
    st.lists(st.integers(-9_999_999, 9_999_999).map(lambda i: i / 1024), max_size=5).map(tuple),
    OBJECT.map(lambda found: {key: value for key, value in found.items() if key not in OWN}),
)  # fmt: skip
RUN = st.builds(
    Run,
    kind=TEXT, results=st.lists(RESULT, max_size=4).map(tuple), created=TEXT, machine=OBJECT,
    versions=st.dictionaries(TEXT, TEXT, max_size=3), commit=st.none() | OBJECT, model=st.none() | OBJECT,
    settings=OBJECT, details=OBJECT, complete=st.booleans(), elapsed_s=NUMBER, command=TEXT,
    sources=st.dictionaries(TEXT, TEXT, max_size=2),
)  # fmt: skip


def rounded(run: Run) -> Run:
    """Samples as files hold them: seven digits."""
    shorter = [replace(r, samples=tuple(float(f"{s:.7g}") for s in r.samples)) for r in run.results]
    return replace(run, results=tuple(shorter))


@given(RUN)
@settings(max_examples=60)
def test_run_json_round_trip_is_equal(run: Run) -> None:
    text = json.dumps(replace_non_finite(run.as_json()), allow_nan=False)
    assert Run.from_json(json.loads(text), "here") == rounded(run)


def test_run_save_then_load_is_equal(tmp_path: Path) -> None:
    run, path = micro(), tmp_path / "made" / "on" / "the way.json"
    run.save(path)
    assert Run.load(path) == rounded(run)
    assert [file.name for file in path.parent.iterdir()] == ["the way.json"]
    head = json.loads(path.read_text())
    assert (head["schema"], head["schema_version"]) == (SCHEMA, SCHEMA_VERSION)


def test_run_save_gzip_is_equal_and_repeatable(tmp_path: Path) -> None:
    run, paths = micro(), [tmp_path / f"{name}.json.gz" for name in ("one", "two")]
    for path in paths:
        run.save(path)
    assert Run.load(paths[0]) == rounded(run)
    assert paths[0].read_bytes()[:2] == b"\x1f\x8b"
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_run_save_non_finite_numbers_become_null(tmp_path: Path) -> None:
    recorder = Recorder("micro")
    recorder.add_result(
        Result("odd", "s", math.nan, -math.inf, math.inf, samples=(1.0, math.nan, 2.0), fields={"x": math.inf})
    )
    recorder.to_run().save(tmp_path / "odd.json")
    assert "NaN" not in (tmp_path / "odd.json").read_text()
    assert "Infinity" not in (tmp_path / "odd.json").read_text()
    (back,) = Run.load(tmp_path / "odd.json").results
    assert all(math.isnan(value) for value in (back.estimate, back.low, back.high, back.samples[1]))
    assert (back.samples[0], back.samples[2], back.fields) == (1.0, 2.0, {"x": None})


def test_run_save_undecodable_path_bytes_are_kept(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.gguf")
    replace(micro(), model={"name": name}).save(tmp_path / "run.json")
    assert (Run.load(tmp_path / "run.json").model or {})["name"] == name


def plain() -> dict[str, Any]:
    recorder = Recorder("micro")
    recorder.add_sample("a", "s", 1.0)
    return dict(replace_non_finite(recorder.to_run().as_json()))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"schema": "other"}, "not a run of `bench`: its schema is 'other'"),
    ({"schema": None}, "its schema is None"),
    ({"schema_version": SCHEMA_VERSION + 1}, f"version {SCHEMA_VERSION + 1}, this program reads {SCHEMA_VERSION}"),
    ({"schema_version": "1"}, "schema version '1'"),
    ({"results": None}, "results is not a list"),
    ({"results": {}}, "results is not a list"),
    ({"results": [3]}, r"results\[0\] is not a JSON object"),
    ({"kind": 7}, "kind is missing or not a text"),
    ({"created": None}, "created is missing or not a text"),
    ({"machine": None}, "machine is not a JSON object"),
    ({"machine": "mine"}, "machine is not a JSON object"),
    ({"commit": "abc"}, "commit is not a JSON object"),
    ({"model": [1]}, "model is not a JSON object"),
    ({"settings": [1]}, "settings is not a JSON object"),
    ({"details": "x"}, "details is not a JSON object"),
    ({"versions": 5}, "versions is not a JSON object"),
    ({"elapsed_s": "long"}, "elapsed_s is missing or not a number"),
]  # fmt: skip
BROKEN_RESULT: list[tuple[dict[str, Any], str]] = [
    ({"name": None}, "name is missing or not a text"),
    ({"unit": 1}, "unit is missing or not a text"),
    ({"estimate": "1"}, "estimate is missing or not a number"),
    ({"low": True}, "low is missing or not a number"),
    ({"high": [1]}, "high is missing or not a number"),
    ({"better": "bigger"}, "better is 'bigger', neither lower nor higher"),
    ({"better": ["lower"]}, "neither lower nor higher"),
    ({"samples": "12"}, "samples is not a list of numbers"),
    ({"samples": [1, "2"]}, "samples is not a list of numbers"),
    ({"samples": [True]}, "samples is not a list of numbers"),
    ({"backend": ["cpu"]}, "backend is not a text"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_run_load_invalid_field_raises_with_reason(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(plain() | changes))
    with pytest.raises(ResultsError, match=message) as error:
        Run.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("changes", "message"), BROKEN_RESULT)
def test_run_from_json_invalid_result_names_its_index(changes: dict[str, Any], message: str) -> None:
    whole = plain()
    whole["results"].append(whole["results"][0] | changes)
    with pytest.raises(ResultsError, match=message) as error:
        Run.from_json(whole, "the file")
    assert str(error.value).startswith("the file: results[1]")


@pytest.mark.parametrize("key", ["name", "unit", "estimate", "low", "high"])
def test_run_from_json_result_without_key_raises(key: str) -> None:
    whole = plain()
    del whole["results"][0][key]
    with pytest.raises(ResultsError, match=f"{key} is missing"):
        Run.from_json(whole, "the file")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"no", b'{"a": 1} x', b"\xff\xfe{}", b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "word", "more", "bytes", "deep", "digits"],
)
def test_run_load_invalid_json_raises(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(ResultsError, match=r"run\.json is not JSON"):
        Run.load(path)


@pytest.mark.parametrize("value", ["[]", "3", "null", '"text"'])
def test_run_load_json_without_object_raises(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(value)
    with pytest.raises(ResultsError, match=r"run\.json is not a JSON object"):
        Run.load(path)


def test_run_from_json_huge_integer_becomes_infinity() -> None:
    whole = plain()
    whole["results"][0] |= {"estimate": 10**400, "samples": [-(10**400)]}
    (found,) = Run.from_json(whole, "the file").results
    assert (found.estimate, found.samples) == (math.inf, (-math.inf,))


def test_run_load_huge_file_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_FILE_BYTES", 1 << 20)
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate((1 << 20) + 1)
    for path in (tmp_path / "huge.json", Path("/dev/zero")):  # a size that is known, and one that is not
        with pytest.raises(ResultsError, match="too large"):
            Run.load(path)


def test_run_load_missing_file_or_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"cannot read .*nowhere\.json: No such file"):
        Run.load(tmp_path / "nowhere.json")
    with pytest.raises(ResultsError, match=r"cannot read .*: Is a directory"):
        Run.load(tmp_path)


def test_run_save_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    micro().save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        replace(micro(), details={"an object": object()}).save(path)  # a mistake of ours
    assert path.read_bytes() == before
    for wrong in (tmp_path, tmp_path / "run.json" / "below.json", tmp_path / ("x" * 300 + ".json"), Path("/")):
        with pytest.raises(ResultsError, match="cannot write"):
            micro().save(wrong)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert path.read_bytes() == before


def test_recorder_groups_samples_by_name_and_backend() -> None:
    recorder = Recorder("micro")
    for i in range(4):
        for backend in ("reference", "cpu"):
            recorder.add_sample("rope", "s", float(i), backend=backend, iterations=i)
    recorder.add_sample("speed", "tok/s", 5.0, "higher")
    recorder.add_result(Result.exact("size", "B", 10.0))
    recorder.add_result(Result.exact("size", "B", 12.0))
    run = recorder.to_run(complete=False)
    assert [result.key for result in run.results] == [
        ("size", None), ("rope", "reference"), ("rope", "cpu"), ("speed", None)
    ]  # fmt: skip
    assert [(r.estimate, r.low, r.high) for r in run.results if r.name in ("size", "speed")] == [
        (12.0,) * 3,
        (5.0,) * 3,
    ]
    rope = run.results[1]
    assert (rope.samples, rope.estimate, rope.fields["iterations"]) == ((0.0, 1.0, 2.0, 3.0), 1.5, 3)
    assert rope.low <= rope.estimate <= rope.high
    assert not run.complete
    assert {"fingerprint", "cpu", "cores", "features"} <= set(run.machine)
    assert {"llm-worker-rbee", "python", "numpy"} <= set(run.versions)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="this is not a checkout: there is no docs/saved-runs.md")
def test_documentation_names_every_field() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    run = micro()
    fields = {*run.as_json(), *run.machine, *(run.commit or {}), *(key for r in run.results for key in r.as_json())}
    assert {field for field in fields if f"`{field}`" not in text} == set()
    assert f"`schema_version` is `{SCHEMA_VERSION}`" in text
    assert f"over {results.MAX_FILE_BYTES >> 20} MiB" in text
    assert f"larger than {statistics.NOISE:.0%}" in text


@pytest.mark.skipif(not DOCUMENT.exists(), reason="this is not a checkout: there is no docs/saved-runs.md")
def test_documentation_names_fields_of_each_kind() -> None:
    text, folder = DOCUMENT.read_text(encoding="utf-8"), Path(results.__file__).parent
    found = set()
    for path in [*folder.rglob("*.py"), *(folder.parent / "benchmarks" / "claims").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found |= _written(node)
    assert {"rounds", "set_aside", "left_out", "resident_after_drop", "verdicts", "works"} <= found
    assert {name for name in found if f"`{name}`" not in text} == set()


def _written(node: ast.AST) -> set[str]:
    """The keys that a piece of code puts into a result's fields or a run's details."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("details"):
        return {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    if not isinstance(node, ast.Call):
        return set()
    called = ast.unparse(node.func)
    if called.endswith("details.setdefault"):
        return {ast.literal_eval(node.args[0])}
    if called in ("Result.from_samples", "Result.exact") or called.endswith(("recorder.add_sample", "details.update")):
        return {word.arg for word in node.keywords if word.arg}
    return set()


def test_quantity_has_three_digits_on_both_sides_of_a_hundred() -> None:
    values = (0.099_994, 0.099_999_999, 0.1, 0.000_999_9)
    assert [results.quantity(value, "s") for value in values] == ["99.99 ms", "100 ms", "100 ms", "1,000 us"]
