"""Conversion to GGUF: the file gives the same model as the folder and is readable by others, or an error names why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError, TokenizerError, UnsupportedModelError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.convert import TYPES, convert, planned_types, quantize_checkpoint
from llm_worker_rbee.models.sampling_defaults import read_sampling_defaults
from llm_worker_rbee.tokenizer import tokenizer_from_gguf, tokenizer_from_hf
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import Typed, write_gguf
from llm_worker_rbee.weights.quantize import ENCODERS
from llm_worker_rbee.weights.quants import BLOCK_TYPES, dequantize
from tests.helpers import model_runs, model_zoo, mtp_models
from tests.helpers.minimal_gguf import write_split
from tests.helpers.synthetic import Shape, Spec, write
from tests.helpers.tokenizer_metadata import data, seeded, unicode_text
from tests.models.test_families import load_gguf_with_transformers
from tests.tokenizer import test_from_gguf_spm

ROWS = 300
SPECIALS = ["<|end|>", "<|user|>"]
Made = tuple[model_zoo.Variant, Any, Path]


def byte_library(pre: Any = None, more: Sequence[tuple[str, str]] = (), **model: Any) -> Library:
    """Return a byte-level vocabulary: two control tokens, bytes, a few merges, one added text token."""
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("1", "2"), ("12", "3"), *more]
    texts = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    library = Library(models.BPE({text: i for i, text in enumerate(texts)}, merges, **model))
    library.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIALS)
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    return library


def spm_library(**training: Any) -> Library:
    """Return a SentencePiece model in transformers' form: every pair that forms a token is a merge."""
    processor: sentencepiece.SentencePieceProcessor = test_from_gguf_spm.train(**training)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    pairs = [
        (piece[:cut], piece[cut:], processor.get_score(i))
        for i, piece in enumerate(pieces)
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    merges = [(left, right) for left, right, _ in pairs]
    library = Library(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    first = [normalizers.Prepend("▁")] if training.get("add_dummy_prefix", True) else []
    library.normalizer = normalizers.Sequence([*first, *steps])
    strip = [decoders.Strip(" ", 1, 0)] if first else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def add_tokenizer(folder: Path, library: Library | None = None, **settings: Any) -> Path:
    (library or byte_library()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", **settings}), encoding="utf-8")
    generation = folder / "generation_config.json"
    generation.unlink(missing_ok=True)  # its eos_token_id belongs to the zoo's vocabulary
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a zoo model with a vocabulary for its tokenizer: (variant, transformers model, folder), made once."""
    cache: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in cache:
            known = model_zoo.ZOO[name].settings
            sizes = {
                key: ROWS for key in ("vocab_size", "vocab_size_per_layer_input") if key in {**known, "vocab_size": 0}
            }
            variant = replace(model_zoo.ZOO[name], settings={**known, **sizes})
            model = model_zoo.make_hf(variant)
            folder = model_zoo.save_hf(model, tmp_path_factory.mktemp(name) / "hf")
            cache[name] = variant, model, add_tokenizer(folder)
        return cache[name]

    return make


def converted(folder: Path, path: Path, kind: str) -> Path:
    return convert(open_checkpoint(folder), path, kind).path


EXPRESSIBLE = [name for name in model_zoo.ZOO if name not in model_zoo.NO_GGUF_KEY]
FLOATS = re.compile(
    r"\.bias$|ffn_gate_inp\.weight$|conv\.conv|ssm_conv1d|per_layer_model_proj"
)  # matrices that stay float32


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_convert_logits_equal_those_of_folder(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, _, folder = made(name)
    ids = model_zoo.prompt_ids(variant)
    expected = model_runs.compute_logits(model_runs.load(folder, variant.max_context), ids)
    exact = converted(folder, tmp_path / "f32.gguf", "F32")
    assert np.abs(model_runs.compute_logits(model_runs.load(exact, variant.max_context), ids) - expected).max() < 1e-3
    close = converted(folder, tmp_path / "q8_0.gguf", "q8_0")
    near = model_runs.compute_logits(model_runs.load(close, variant.max_context), ids)
    bound = 0.25 if "num_experts_per_tok" in variant.settings else 0.06  # a token may get another expert
    assert 0 < np.sqrt(np.mean(np.square(near - expected))) < bound * expected.std()
    matrices = [t for t in open_checkpoint(close).tensors.values() if len(t.shape) > 1]
    quantized = [t for t in matrices if not FLOATS.search(t.name) and t.shape[-1] % 32 == 0]
    assert {t.kind.name for t in quantized} == {"Q8_0"}
    assert {t.kind.name for t in open_checkpoint(close).tensors.values() if len(t.shape) == 1} == {"F32"}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_convert_file_equals_model_zoo_file(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Keys and tensors as llama.cpp's converter has them."""
    variant, model, folder = made(name)
    ours = open_checkpoint(converted(folder, tmp_path / "ours.gguf", "F32"))
    theirs = open_checkpoint(model_zoo.save_gguf(variant, model, tmp_path / "theirs.gguf"))
    missing = {key for key in theirs.metadata if key not in ours.metadata}
    assert missing <= {f"{theirs.architecture}.rope.scaling.original_context_length"}  # of llama3, which no reader uses
    for key in theirs.metadata.keys() - missing - {"general.name"}:
        assert ours.metadata[key] == pytest.approx(theirs.metadata[key]), key
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        assert np.allclose(ours.tensors[key].dequantize(), tensor.dequantize(), rtol=1e-6), key


@pytest.mark.parametrize("name", mtp_models.VARIANTS)
def test_convert_keeps_a_head_for_multi_token_prediction(name: str, tmp_path: Path) -> None:
    model = mtp_models.make(name, vocab_size=ROWS)
    folder = add_tokenizer(model.save_hf(tmp_path / "hf"))
    ours = open_checkpoint(converted(folder, tmp_path / "ours.gguf", "F32"))
    theirs = open_checkpoint(model.save_gguf(tmp_path / "theirs.gguf"))
    counts = ("block_count", "nextn_predict_layers")
    assert [ours.metadata[f"{ours.architecture}.{key}"] for key in counts] == [model.n_layers + 1, 1]
    assert read_model_config(ours) == read_model_config(theirs)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        assert np.allclose(ours.tensors[key].dequantize(), tensor.dequantize(), rtol=1e-6, atol=1e-6), key


@pytest.mark.parametrize("name", ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"])
def test_convert_file_is_loaded_by_transformers(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, model, folder = made(name)
    path = converted(folder, tmp_path / "model.gguf", "F32")
    loaded = load_gguf_with_transformers(path, model.config)
    ids = model_zoo.prompt_ids(variant)
    assert np.abs(model_zoo.hf_logits(loaded, ids) - model_zoo.hf_logits(model, ids)).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "setting"),
    [("qwen2-window", "sliding_window in some of the layers"), ("gemma2-scale", "query_pre_attn_scalar")],
)
def test_convert_inexpressible_config_raises(
    name: str, setting: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    _, _, folder = made(name)
    arch = name.split("-")[0]
    wanted = f"^config.json: {setting} cannot be expressed in a GGUF of architecture '{arch}'$"
    with pytest.raises(UnsupportedModelError, match=wanted):
        converted(folder, tmp_path / "out.gguf", "F16")
    assert list(tmp_path.iterdir()) == []


def test_convert_linear_attention_in_other_layers_is_listed(tmp_path: Path) -> None:
    """Layers that no interval gives are listed; the sections of M-RoPE are written even if config.json has none."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    settings = {**model_zoo.QWEN_LINEAR, "num_hidden_layers": 3, "layer_types": kinds, "vocab_size": ROWS}
    for more, key in (({}, "full_attention_interval"), ({"layer_types": kinds[1:] * 2}, "attention.recurrent_layers")):
        variant = model_zoo.Variant("qwen3_5_text", {**settings, **more, "num_hidden_layers": 3 + len(more)})
        folder = add_tokenizer(model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path / key))
        made = open_checkpoint(converted(folder, tmp_path / "out.gguf", "F32"))
        assert list(made.metadata["qwen35.rope.dimension_sections"]) == [11, 11, 10, 0]
        assert f"qwen35.{key}" in made.metadata
        assert read_model_config(made).layer_kinds == read_model_config(open_checkpoint(folder)).layer_kinds


YARN = {**model_zoo.YARN, "beta_fast": 16.0}


@pytest.mark.parametrize(("rope", "message"), [
    ({**YARN, "attention_factor": 1.7}, None),
    ({**YARN, "factor": 1.0}, None),
    ({**YARN, "truncate": False}, "rope scaling 'yarn' with its settings"),
    ({**model_zoo.LINEAR, "attention_factor": 1.5}, None),
])  # fmt: skip
def test_convert_rope_settings_are_kept_or_raise(rope: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    variant = model_zoo.Variant("llama", {"rope_parameters": rope, "vocab_size": ROWS})
    folder = add_tokenizer(model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path / "hf"))
    if message is not None:
        with pytest.raises(UnsupportedModelError, match=message):
            converted(folder, tmp_path / "out.gguf", "F32")
        return
    ids = model_zoo.prompt_ids(variant)
    ours = model_runs.load(converted(folder, tmp_path / "out.gguf", "F32"))
    assert (
        np.abs(model_runs.compute_logits(ours, ids) - model_runs.compute_logits(model_runs.load(folder), ids)).max()
        < 1e-3
    )


def test_convert_sharded_float16_with_name(tmp_path: Path) -> None:
    variant = model_zoo.Variant("llama", {"rope_parameters": model_zoo.DEFAULT_ROPE, "vocab_size": ROWS})
    model = model_zoo.make_hf(variant).bfloat16()
    folder = add_tokenizer(model_zoo.save_hf(model, tmp_path / "my-model", shard="60KB"))
    assert len(list(folder.glob("*.safetensors"))) > 1
    made = open_checkpoint(converted(folder, tmp_path / "out.gguf", "BF16"))
    assert made.metadata["general.name"] == "my-model"
    names = list(made.tensors)
    assert names[0] == "token_embd.weight"
    assert names[-2:] == ["output_norm.weight", "output.weight"]
    assert [int(n.split(".")[1]) for n in names if n.startswith("blk.")] == sorted([0] * 9 + [1] * 9 + [2] * 9)
    source = open_checkpoint(folder)
    assert np.array_equal(made.tensors["blk.1.ffn_up.weight"].data, source.tensors["blk.1.ffn_up.weight"].data)


# Tokenizers


def ids_agree(folder: Path, path: Path, *, special: bool = True) -> None:
    ours, theirs = tokenizer_from_gguf(open_checkpoint(path).metadata), tokenizer_from_hf(folder)

    def check(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))

    for text in [*data("texts.json"), "<tool>x", "a <|user|> b"]:
        check(text)
    seeded(given(unicode_text)(check))()
    if special:
        text = "<|user|>the he<|end|>"
        assert ours.encode(text, parse_special=True) == theirs.encode(text, parse_special=True)
    assert (ours.bos_id, ours.eos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_id, theirs.eos_ids)
    assert (ours.add_bos, ours.add_eos, ours.chat_template) == (theirs.add_bos, theirs.add_eos, theirs.chat_template)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ONE_DIGIT = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def split(pattern: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


# The pre-tokenizers of published models, as their tokenizer.json writes them.
PRES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-2": (None, {}),
    "llama-bpe": (split(LLAMA3), {"ignore_merges": True}),
    "dbrx": (split(LLAMA3), {}),
    "qwen2": (split(ONE_DIGIT), {}),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), {}),
}


@pytest.fixture
def llama(made: Callable[[str], Made], tmp_path: Path) -> Path:
    """Return a copy of a llama folder whose tokenizer may be changed."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in made("llama")[2].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("pre", PRES)
def test_convert_byte_level_tokenizer_gives_same_ids(pre: str, llama: Path, tmp_path: Path) -> None:
    splitter, settings = PRES[pre]
    add_tokenizer(llama, byte_library(splitter, **settings), bos_token="<|user|>", chat_template="{{ messages }}")
    path = converted(llama, tmp_path / "out.gguf", "F16")
    metadata = open_checkpoint(path).metadata
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", pre)
    assert len(metadata["tokenizer.ggml.tokens"]) == ROWS
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{ROWS - 1}]"
    ids_agree(llama, path)


@pytest.mark.parametrize("prefix", [True, False])
def test_convert_sentencepiece_tokenizer_gives_same_ids(prefix: bool, tmp_path: Path) -> None:
    library = spm_library(add_dummy_prefix=prefix)
    variant = model_zoo.Variant(
        "llama", {"rope_parameters": model_zoo.DEFAULT_ROPE, "vocab_size": library.get_vocab_size()}
    )
    folder = model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path / "hf")
    add_tokenizer(folder, library, bos_token="<s>", eos_token="</s>")
    path = converted(folder, tmp_path / "out.gguf", "F16")
    metadata = open_checkpoint(path).metadata
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] == prefix
    ids_agree(folder, path, special=False)


def test_convert_several_eos_tokens_are_kept(llama: Path, tmp_path: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 5]}), encoding="utf-8")
    path = converted(llama, tmp_path / "out.gguf", "F16")
    metadata = open_checkpoint(path).metadata
    assert tokenizer_from_gguf(metadata).eos_ids == {0, 1, 5}
    assert metadata["tokenizer.ggml.eos_token_id"] == 0


def test_convert_keeps_sampling_defaults(llama: Path, tmp_path: Path) -> None:
    """Numbers are written with the keys and types of llama.cpp's converter; typical_p has no key."""
    generation_config = {
        "temperature": 0.6,
        "top_k": 20,
        "min_p": 0,
        "typical_p": 0.9,
        "repetition_penalty": 1.05,
        "top_p": "x",
    }
    (llama / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    checkpoint = open_checkpoint(converted(llama, tmp_path / "out.gguf", "F16"))
    sampling = "general.sampling."
    types = {key.removeprefix(sampling): t for key, t in checkpoint.value_types.items() if key.startswith(sampling)}
    assert types == {"temp": "float32", "top_k": "int32", "min_p": "float32", "penalty_repeat": "float32"}
    found, expected = (read_sampling_defaults(one).values for one in (checkpoint, open_checkpoint(llama)))
    assert found == {**expected, "typical_p": 1.0}
    (llama / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}', encoding="utf-8")
    greedy = open_checkpoint(converted(llama, tmp_path / "greedy.gguf", "F16"))
    assert greedy.metadata["general.sampling.temp"] == 0.0


def test_convert_token_named_none_is_not_unknown(llama: Path, tmp_path: Path) -> None:
    """tokenizer.json has null if there is no unknown token."""
    add_tokenizer(llama, byte_library(more=[("N", "o"), ("No", "n"), ("Non", "e")]))
    metadata = open_checkpoint(converted(llama, tmp_path / "out.gguf", "F16")).metadata
    assert metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index("None")] == 1
    assert "tokenizer.ggml.unknown_token_id" not in metadata


def word_level() -> Library:
    return Library(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))


def two_at_the_end() -> Library:
    library = byte_library()
    library.post_processor = processors.TemplateProcessing(
        single="<|user|> <|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    return library


def lower_case() -> Library:
    library = byte_library()
    library.normalizer = normalizers.Lowercase()
    return library


def few_merges() -> Library:
    library = spm_library()
    source = json.loads(library.to_str())
    source["model"]["merges"] = source["model"]["merges"][::2]
    return Library.from_str(json.dumps(source))


REFUSED: dict[str, tuple[Callable[[], Library], str]] = {
    "words": (word_level, "a model of type 'WordLevel' cannot be stored in a GGUF, only BPE, WordPiece and Unigram"),
    "post-processor": (two_at_the_end, "its post_processor adds more than one token"),
    "pre-tokenizer": (
        lambda: byte_library(split(r"\p{N}{1,7}| ?\p{L}+|\s+")),
        "its pre_tokenizer splits text like none",
    ),
    "prefix": (lambda: byte_library(pre_tokenizers.ByteLevel(True)), "its pre_tokenizer splits text like none"),
    "normalizer": (lower_case, 'a GGUF cannot express it: "Hello, world!'),
    "merges": (few_merges, "its merges lack"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_convert_inexpressible_tokenizer_raises(why: str, tmp_path: Path) -> None:
    make, message = REFUSED[why]
    variant = model_zoo.Variant("llama", {"rope_parameters": model_zoo.DEFAULT_ROPE, "vocab_size": 1200})
    folder = model_zoo.save_hf(model_zoo.make_hf(variant), tmp_path / "hf")
    make().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        converted(folder, tmp_path / "out.gguf", "F16")
    assert not (tmp_path / "out.gguf").exists()


def test_convert_incomplete_folder_raises(llama: Path, tmp_path: Path) -> None:
    source = json.loads((llama / "tokenizer.json").read_text(encoding="utf-8"))
    source["model"]["vocab"]["beyond"] = ROWS
    (llama / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    with pytest.raises(TokenizerError, match="the embedding of 300 rows has no row for 'beyond'"):
        converted(llama, tmp_path / "out.gguf", "F16")
    (llama / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        converted(llama, tmp_path / "out.gguf", "F16")


# From GGUF


def test_convert_gguf_keeps_its_metadata(made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, model, _ = made("llama3")
    metadata = {
        **model_zoo.gguf_metadata(variant, model),
        "general.file_type": Typed("uint32", 0),
        "general.tags": ["a", "b"],
        "some.bool": True,
        "some.small": Typed("int8", -3),
        "some.numbers": Typed("float64", [0.5, 2.0]),
        "some.flags": Typed("bool", [True, False]),
        "some.nested": [[1, 2], [3]],
        "some.none": Typed("string", []),
    }
    parts = write_split(tmp_path / "model.gguf", metadata, model_zoo.gguf_tensors(variant, model), 2)
    source = open_checkpoint(parts[0])
    result = convert(source, tmp_path / "out.gguf", "Q5_1", threads=3)
    made_file = open_checkpoint(result.path)
    own = {"general.file_type": 9, "general.quantization_version": 2}
    for key in source.metadata.keys() | own.keys():
        if key.startswith("split."):
            assert key not in made_file.metadata
        else:
            wanted = own.get(key, source.metadata.get(key))
            assert str(made_file.metadata[key]) == str(wanted)
            assert made_file.value_types[key] == source.value_types.get(key, "uint32"), key
    assert result.bytes == result.path.stat().st_size
    assert sum(result.tensors.values()) == len(source.tensors)
    read = gguf.GGUFReader(result.path)
    assert {t.name for t in read.tensors} == source.tensors.keys()
    for tensor in read.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        assert np.array_equal(values, made_file.tensors[tensor.name].dequantize().reshape(-1))
        wanted = source.tensors[tensor.name].dequantize().reshape(-1)
        assert np.abs(values - wanted).max() <= 0.06 * np.abs(wanted).max()


def test_convert_unchanged_types_are_copied(made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, model, _ = made("llama")
    once = convert(
        open_checkpoint(model_zoo.save_gguf(variant, model, tmp_path / "a.gguf")), tmp_path / "b.gguf", "Q4_0"
    )
    again = convert(open_checkpoint(once.path), tmp_path / "c.gguf", "Q4_0")
    assert once.path.read_bytes() == again.path.read_bytes()


def test_convert_model_refused_by_loader_raises(made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, model, _ = made("llama")
    metadata, tensors = model_zoo.gguf_metadata(variant, model), model_zoo.gguf_tensors(variant, model)
    write_gguf(tmp_path / "a.gguf", metadata, {n: t for n, t in tensors.items() if n != "blk.1.attn_q.weight"})
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.1\.attn_q\.weight' is missing"):
        converted(tmp_path / "a.gguf", tmp_path / "out.gguf", "Q8_0")
    broken = np.array(tensors["blk.1.attn_q.weight"])
    broken[3, 3] = np.nan
    write_gguf(tmp_path / "b.gguf", metadata, {**tensors, "blk.1.attn_q.weight": broken})
    with pytest.raises(ModelFileError, match=r"'blk\.1\.attn_q\.weight' holds a NaN or infinite value in block 195"):
        converted(tmp_path / "b.gguf", tmp_path / "out.gguf", "Q8_0")
    broken[3, 3] = 1e9
    write_gguf(tmp_path / "c.gguf", metadata, {**tensors, "blk.1.attn_q.weight": broken})
    with pytest.raises(ModelFileError, match=r"'blk\.1\.attn_q\.weight': a value of 1e\+09 does not fit into Q8_0"):
        converted(tmp_path / "c.gguf", tmp_path / "out.gguf", "Q8_0")
    write_gguf(tmp_path / "d.gguf", {"general.architecture": "mamba"})
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba' is not supported"):
        converted(tmp_path / "d.gguf", tmp_path / "out.gguf", "Q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.gguf", "d.gguf"]


def test_convert_every_type_is_written_and_others_raise(made: Callable[[str], Made]) -> None:
    kinds = {kind for mix in TYPES.values() for kind in (mix.base, *(k for r in mix.rules.values() for _, k in r))}
    assert kinds <= {*ENCODERS, "MXFP4"}  # of which experts are MXFP4 already
    with pytest.raises(InvalidRequestError, match="unknown type 'Q3_K_M': use one of F32, F16, BF16"):
        quantize_checkpoint(open_checkpoint(made("llama")[2]), "Q3_K_M")


def test_convert_of_eight_experts_has_the_types_of_llama_cpp(tmp_path: Path) -> None:
    """As its quantizer gives them: attention beside eight experts has more bits, routers are float32."""
    shape = Shape(4, 256, 8, 2, 256, 320, 64, experts=8, used_experts=2, expert_ff=256)
    source = write(Spec("eight", shape, "BF16", 4), tmp_path / "m.gguf")
    made = open_checkpoint(converted(source, tmp_path / "q.gguf", "Q4_K_M")).tensors
    kinds = {name.removeprefix("blk.0.").removesuffix(".weight"): t.kind.name for name, t in made.items()}
    assert {name: kinds[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output")} == {
        "attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q8_0", "attn_output": "Q5_K"
    }  # fmt: skip
    assert (kinds["ffn_gate_inp"], kinds["ffn_up_exps"], kinds["ffn_gate_exps"]) == ("F32", "Q4_K", "Q4_K")
    assert [made[f"blk.{i}.ffn_down_exps.weight"].kind.name for i in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]


# In memory


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_quantize_experts_in_memory_answers_as_converted_file(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Of a folder with a tensor for each expert, or with one of gate and up together."""
    variant, _, folder = made(name)
    ids, source = model_zoo.prompt_ids(variant), open_checkpoint(folder)
    expected = model_runs.compute_logits(model_runs.load(converted(folder, tmp_path / "m.gguf", "Q8_0")), ids)
    quantized = quantize_checkpoint(source, "Q8_0")
    model = load_model(quantized, ReferenceBackend(), read_model_config(source))
    assert np.abs(model_runs.compute_logits(model, ids) - expected).max() < 1e-4
    assert set(planned_types(source, "Q8_0")) <= set(source.tensors)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2"])
def test_quantize_checkpoint_equals_converted_file(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, model, folder = made(name)
    for path in (folder, model_zoo.save_gguf(variant, model, tmp_path / "model.gguf")):
        source = open_checkpoint(path)
        quantized = quantize_checkpoint(source, "Q4_K_M", threads=2)
        assert quantized.tensors.keys() == source.tensors.keys()
        assert quantized.tensors["output_norm.weight"] is source.tensors["output_norm.weight"]
        written = open_checkpoint(converted(path, tmp_path / "out.gguf", "Q4_K_M"))
        for key, tensor in quantized.tensors.items():
            if len(tensor.shape) == 2:
                assert tensor.kind.name == written.tensors[key].kind.name
                assert sorted(map(bytes, tensor.rows)) == sorted(map(bytes, written.tensors[key].rows))
        ids = model_zoo.prompt_ids(variant)
        ours = load_model(quantized, select_backend(backend="reference"), read_model_config(quantized))
        expected = model_runs.compute_logits(model_runs.load(tmp_path / "out.gguf"), ids)
        assert np.abs(model_runs.compute_logits(ours, ids) - expected).max() < 1e-3


def test_convert_k_types_are_used_for_whole_super_blocks(tmp_path: Path) -> None:
    shape = {"vocab_size": ROWS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9}
    variant = model_zoo.Variant("llama", {"rope_parameters": model_zoo.DEFAULT_ROPE, **shape})
    source = open_checkpoint(model_zoo.save_gguf(variant, model_zoo.make_hf(variant), tmp_path / "model.gguf"))
    types = {t.name: t.kind.name for t in quantize_checkpoint(source, "Q4_K_M").tensors.values()}
    assert (types["output.weight"], types["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert [types[f"blk.{i}.ffn_down.weight"] for i in range(9)] == [
        "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K", "Q6_K",
    ]  # fmt: skip
    alone = quantize_checkpoint(source, "Q4_K").tensors
    assert {t.kind.name for n, t in alone.items() if len(t.shape) == 2 and n != "output.weight"} == {"Q4_K"}
    down = source.tensors["blk.4.ffn_down.weight"].dequantize()
    made = dequantize(BLOCK_TYPES["Q4_K"], alone["blk.4.ffn_down.weight"].data, down.shape)
    assert np.sqrt(np.mean(np.square(made - down))) < 0.08 * down.std()
