"""Tokenizers from a folder with tokenizer.json: ids and text equal the `tokenizers` library."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from llm_worker_rbee.errors import TokenizerError
from llm_worker_rbee.tokenizer import tokenizer_from_hf
from tests.helpers.tokenizer_metadata import data, seeded, unicode_text

SPECIAL = ["<unk>", "<s>", "</s>", "<|eot_id|>"]


def training_texts() -> list[str]:
    """Drop the names of special tokens, so that no merges form one."""
    return [text for text in data("texts.json") if not any(name in text for name in SPECIAL)]


def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL[1:], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(training_texts(), trainer)
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


def llama_style() -> Library:
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    library = Library(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*SPECIAL, *alphabet], limit_alphabet=120, show_progress=False
    )
    library.train_from_iterator(training_texts(), trainer)
    source = json.loads(library.to_str())
    source["added_tokens"] = source["added_tokens"][: len(SPECIAL)]  # the byte tokens belong to the model alone
    return Library.from_str(json.dumps(source))


LIBRARIES = {"byte_level": byte_level, "llama_style": llama_style}


def write(folder: Path, library: Library, **files: object) -> Path:
    library.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", LIBRARIES)
def test_encode_and_decode_equal_tokenizers_library(kind: str, tmp_path: Path) -> None:
    library = LIBRARIES[kind]()
    tokenizer = tokenizer_from_hf(write(tmp_path, library))
    assert tokenizer.kind == "tokenizer.json"
    assert tokenizer.vocab_size == library.get_vocab_size()
    special = Library.from_str(library.to_str())
    library.encode_special_tokens = True

    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        parsed = special.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False, parse_special=True) == parsed
        assert tokenizer.decode(ids) == library.decode(ids)
        if "▁" not in text:
            assert tokenizer.decode(ids) == text

    for text in [*data("texts.json"), "<s>a</s>", "x <tool> y"]:
        check(text)
    seeded(given(unicode_text)(check))()


def test_encode_control_tokens_are_text_unless_parse_special(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_hf(write(tmp_path, byte_level()))
    assert tokenizer.encode("</s>", parse_special=True)[-1] == tokenizer.token_id("</s>")
    assert tokenizer.token_id("</s>") not in tokenizer.encode("</s>")
    assert tokenizer.encode("<tool>", add_special=False) == [tokenizer.token_id("<tool>")]


def test_token_named_none_is_a_normal_token(tmp_path: Path) -> None:
    """A model without an unknown token has `null`, not the word."""
    source = json.loads(byte_level().to_str())
    model = source["model"]
    for left, right in (("N", "o"), ("No", "n"), ("Non", "e")):
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = max(model["vocab"].values()) + 2  # one id is the added token's
        model["merges"].insert(0, [left, right])
    assert model["unk_token"] is None
    tokenizer = tokenizer_from_hf(write(tmp_path, Library.from_str(json.dumps(source))))
    ids = tokenizer.encode("None", add_special=False)
    assert tokenizer.decode(ids) == "None"
    assert tokenizer.token_id("None") in ids


def test_bos_and_eos_are_read_from_json_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        byte_level(),
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        config={"eos_token_id": 300, "vocab_size": 2000},
        generation_config={"eos_token_id": [301, 302]},
    )
    tokenizer = tokenizer_from_hf(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.eos_ids == {1, 300, 301, 302, 2}  # the last one by name
    assert tokenizer.add_bos
    assert tokenizer.encode("<s>hi", parse_special=True).count(0) == 1
    assert tokenizer.encode("") == [0]
    assert tokenizer.decode([1999]) == ""  # a padding row of the embedding


def test_tokenizer_config_overrides_post_processor(tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    tokenizer = tokenizer_from_hf(write(tmp_path, byte_level(), tokenizer_config=settings))
    assert not tokenizer.add_bos
    assert tokenizer.add_eos
    assert tokenizer.encode("") == [1]


def test_special_tokens_map_gives_bos_and_eos(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_hf(write(tmp_path, byte_level(), special_tokens_map={"eos_token": "</s>"}))
    assert tokenizer.eos_id == 1


def test_chat_template_from_jinja_file_or_setting(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write(tmp_path, byte_level(), tokenizer_config={"chat_template": listed})
    assert tokenizer_from_hf(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert tokenizer_from_hf(folder).chat_template == "file"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: not readable as UTF-8"):
        tokenizer_from_hf(folder)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"generation_config": {"eos_token_id": 10**6}}, "generation_config.json: eos_token_id 1000000"),
        ({"config": {"eos_token_id": "x"}}, "config.json: eos_token_id 'x'"),
        ({"tokenizer_config": {"bos_token": "<nosuch>"}}, "<nosuch>"),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template"),
        ({"config": []}, "config.json"),
        ({"tokenizer": {}}, "tokenizer.json"),
        ({"tokenizer": "x"}, "tokenizer.json"),
    ],
)
def test_tokenizer_malformed_input_is_named(files: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_hf(write(tmp_path, byte_level(), **files))
    assert named in str(caught.value)


def test_unknown_decoder_encodes_but_decode_raises(tmp_path: Path) -> None:
    library = byte_level()
    expected = library.encode("hello world", add_special_tokens=False).ids
    library.decoder = decoders.CTC()
    tokenizer = tokenizer_from_hf(write(tmp_path, library))
    assert tokenizer.encode("hello world", add_special=False) == expected
    assert "unknown decoder CTC" in tokenizer.kind
    with pytest.raises(TokenizerError, match="unknown decoder CTC; known: ByteLevel"):
        tokenizer.decode(expected)


def test_folder_without_tokenizer_json_raises(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        tokenizer_from_hf(tmp_path)


def test_encode_protected_names_are_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_hf(write(tmp_path, byte_level(), tokenizer_config={"eos_token": "</s>"}))
    (end,) = tokenizer.encode("</s>", add_special=False, parse_special=True)
    prompt = tokenizer.protect("a</s>b") + "</s>"
    ids = tokenizer.encode(prompt, add_special=False, parse_special=True, protected=True)
    assert ids[-1] == end
    assert end not in ids[:-1]
    assert tokenizer.decode(ids) == "a</s>b"
