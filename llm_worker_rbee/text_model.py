"""The text side of a model: its tokenizer and its chat template, without weights or an engine."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import Thread
from typing import Any, NamedTuple

from .errors import ChatTemplateError, InvalidRequestError, ModelFileError, WorkerError
from .images.decoder import MAX_CPU_S, DecodedImage, ImageDecoder
from .images.prompt import expand_prompt, locate_parts, require_images_fit
from .images.sizes import ImagePart, VisionInfo
from .sampling_params import STRUCTURED, SamplingDefaults, StructuredOutputsParams
from .structured_outputs.chat_grammar import ToolSchemaError, answer_grammar, parameters_schema
from .structured_outputs.grammar import POSITION
from .structured_outputs.grammar_check import GrammarChecker
from .tokenizer import ChatTemplate, Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from .tokenizer.chat.detection import detect_chat_format
from .tokenizer.chat.events import IMAGE, ChatOptions, Image, without_images
from .tokenizer.chat.format import ChatFormat
from .tokenizer.chat.parser import ChatParser
from .tokenizer.chat.template import Message, read_messages, validate_messages
from .weights import Checkpoint

logger = logging.getLogger("llm_worker_rbee.server")


FIND_TOOL_S = 2.0  # for the tool that an error is about
TAIL_CHARS = 1_000  # of a prompt: they tell whether reasoning has begun


class EncodedPrompt(NamedTuple):
    """The ids of a prompt, what parses its answer (None: it is plain content), and the grammar that the answer has."""

    ids: list[int]
    make_parser: Callable[[], ChatParser] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    images: Sequence[ImagePart] = ()


class TextModel:
    """Text to token ids and back, for a model with a vocabulary of `vocab_size` and a context of `max_context`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        vocab_size: int,
        max_context: int,
        sampling_defaults: SamplingDefaults,
        chat_template: str | None = None,
    ) -> None:
        """`chat_template` is Jinja source that replaces the file's own."""
        tokenizer.pad_to(vocab_size)
        Thread(target=tokenizer.prepare, name="prepare-tokenizer", daemon=True).start()
        self.tokenizer, self.vocab_size, self.max_context = tokenizer, vocab_size, max_context
        self.sampling_defaults = sampling_defaults
        self.open_objects = False  # whether objects may have properties that their schemas do not name
        self.system: str | None = None  # of conversations without a system message
        self.first_messages: list[Message] = []  # before the messages of a conversation
        self.vision: VisionInfo | None = None  # None: it takes no images
        self.image_decoder: ImageDecoder | None = None
        self._name = name
        self._chat_format = ChatFormat()
        self._template_source = tokenizer.chat_template if chat_template is None else chat_template

    def close(self) -> None:
        """End the processes that check grammars and render the template; they start again if they are needed."""
        self.grammar_checker.close()
        template: ChatTemplate | None = self.__dict__.get("chat_template")
        if template is not None:
            template.close()
        if self.image_decoder is not None:
            self.image_decoder.close()

    def use_images(self, vision: VisionInfo) -> None:
        """Take images in chats."""
        token = vision.style.token
        if token not in self.tokenizer.verbatim_ids:
            problem = f"the projector ({vision.family}) needs the token {token!r}, which {self._name} does not have"
            raise ModelFileError(f"{problem}: they do not belong together (mmproj)")
        self.vision, self.image_decoder = vision, ImageDecoder(vision.settings, key=vision.digest)
        if "chat_template" in self.__dict__:
            self._adapt_to_images(self.chat_template)

    def decode_image(self, image: Image, cpu_s: float = MAX_CPU_S) -> DecodedImage:
        """Return the pixels of an image within so much CPU time; an error has its place in the request."""
        self.require_vision(image)
        assert self.image_decoder is not None
        try:
            return self.image_decoder.decode(image.data, image.detail, cpu_s)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{image.place}: {error}", "messages") from None

    def require_vision(self, image: Image) -> None:
        """Raise for an image of a request to a model that takes none."""
        if self.vision is None:
            problem = f"{image.place}: {self._name} takes no images, since no vision tower is loaded"
            raise InvalidRequestError(
                f"{problem}: give the file of its projector with --mmproj (in Python: mmproj)", "messages"
            )

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template, compiled, with the rules for messages that it needs; raises where the model has none."""
        if self._template_source is None:
            raise ChatTemplateError(f"{self._name} has no chat template", "chat_template")
        tok = self.tokenizer
        bos, eos = ("" if i is None else tok.piece(i) for i in (tok.bos_id, tok.eos_id))
        template = ChatTemplate(self._template_source, bos_token=bos, eos_token=eos)
        self._chat_format = detect_chat_format(template, tok)
        template.rules = self._chat_format.adaptation()
        if self.vision is not None:
            self._adapt_to_images(template)
        return template

    def _adapt_to_images(self, template: ChatTemplate) -> None:
        """Let the template write images, if it takes them as parts of a message; and keep their names out of texts."""
        assert self.vision is not None
        style, rules, template.rules, shown = self.vision.style, self._chat_format.adaptation(), None, ""
        parts = [{"type": "image"}, {"type": "text", "text": "Hello!"}]
        try:
            shown = template.render([{"role": "user", "content": parts}])
        except WorkerError as error:
            logger.info("the chat template does not take images, which go before it as text: %s", error)
        writes = shown.count(style.placeholder) == 1 and "Hello!" in shown
        markers = [*rules["markers"], style.placeholder, style.token]
        template.rules = {**rules, "parts": rules["parts"] or ("images" if writes else ""), "markers": markers}

    @cached_property
    def grammar_checker(self) -> GrammarChecker:
        """Checks every grammar of a request before an engine gets it."""
        tokenizer = self.tokenizer
        special = {token: tokenizer.piece(token) for token in tokenizer.control_ids if token < self.vocab_size}
        return GrammarChecker(self.vocab_size, special)

    def check_answer_grammar(
        self, options: ChatOptions, guided: StructuredOutputsParams | None, grammar: StructuredOutputsParams
    ) -> StructuredOutputsParams:
        """Return the grammar that `encode_chat` wrote for an answer; raise an error that names the tool at fault."""
        try:
            return self.grammar_checker.check(grammar)
        except InvalidRequestError as error:
            self._check_tools(options)
            reason = POSITION.sub("", str(error).partition(": ")[2])
            if guided is None:
                message, field = f"the parameters of the tools cannot be used: {reason}", "tools"
            else:
                message, field = f"{STRUCTURED}.{guided.kind} cannot be used: {reason}", STRUCTURED
            raise InvalidRequestError(message, field) from None

    def _check_tools(self, options: ChatOptions) -> None:
        """Raise for the first tool whose schema is in the grammar and cannot be used; the search is bounded."""
        end = time.perf_counter() + FIND_TOOL_S
        for i, tool in enumerate(() if options.tool_choice == "none" else options.tools):
            is_held = tool.strict or options.tool_choice == "required" or options.tool_name == tool.name
            if not is_held or options.tool_name not in (None, tool.name) or time.perf_counter() > end:
                continue
            try:
                self.grammar_checker.check(StructuredOutputsParams(json=parameters_schema(tool)))
            except InvalidRequestError as error:
                raise ToolSchemaError(i, tool.name, str(error).partition(": ")[2] or str(error)) from None

    def check_grammar(self, structured_outputs: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return a grammar as engines compile it; raise if it cannot be used."""
        resolved = self.resolve_objects(structured_outputs)
        return None if resolved is None else self.grammar_checker.check(resolved)

    def resolve_objects(self, structured_outputs: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return a grammar with the default of this model for objects; what a request says counts more."""
        if structured_outputs is None or structured_outputs.json is None or not self.open_objects:
            return structured_outputs
        return replace(structured_outputs, additional_properties=structured_outputs.additional_properties or "open")

    @property
    def chat_format(self) -> ChatFormat:
        """How the model writes reasoning and calls; raises where it has no chat template."""
        assert self.chat_template is not None
        return self._chat_format

    def render_chat(self, messages: bytes, options: ChatOptions) -> str:
        """Return the prompt of messages as JSON, with names of control tokens in them broken up."""
        variables = self.chat_format.template_variables(options.template_kwargs)
        return self.chat_template.render_json(
            self._with_defaults(messages),
            protected=self.tokenizer,
            tools=options.tools or None,
            template_kwargs=variables,
        )

    def _with_defaults(self, messages: bytes) -> bytes:
        """Return a conversation with the model's own system message and first messages."""
        if self.system is None and not self.first_messages:
            return messages
        own: list[Message] = json.loads(messages)
        system = [own.pop(0)] if own and own[0]["role"] == "system" else []
        if self.system is not None and not system:
            system = [{"role": "system", "content": without_images(self.system)}]
        first = validate_messages(self.first_messages) if self.first_messages else []
        return json.dumps([*system, *first, *own]).encode()

    def encode_chat(
        self,
        prompt: str,
        options: ChatOptions,
        structured_outputs: StructuredOutputsParams | None,
        images: Sequence[DecodedImage] = (),
    ) -> EncodedPrompt:
        """Encode a rendered chat prompt and its images; return ids, a parser factory and the answer's grammar."""
        ids, parts = self._encode_images(prompt, images)
        tail, shape = prompt[-TAIL_CHARS:], self.chat_format
        guided = structured_outputs
        is_free = guided is None and not options.tools and options.thinking_budget is None
        if not is_free and (guided is None or options.tools or shape.has_reasoning or shape.content_start):
            structured = None if guided is None else (guided.kind, getattr(guided, guided.kind))
            objects = guided.additional_properties if guided is not None else None
            is_open = self.open_objects if objects is None else objects == "open"
            grammar = answer_grammar(shape, options, structured, prompt_tail=tail, open_objects=is_open)
            guided = None if grammar is None else StructuredOutputsParams(grammar=grammar)
        has_calls = bool(options.tools) and options.tool_choice != "none"
        if not (has_calls or shape.has_reasoning):
            return EncodedPrompt(ids, None, guided, parts)
        parser = partial(
            ChatParser,
            shape,
            tools=options.tools,
            prompt_tail=tail,
            parse_tools=has_calls,
            parse_json_calls=structured_outputs is None,
        )
        return EncodedPrompt(ids, parser, guided, parts)

    def _encode_images(self, prompt: str, images: Sequence[DecodedImage]) -> tuple[list[int], Sequence[ImagePart]]:
        """Return the ids of a prompt, and its images with their places."""
        if (vision := self.vision) is not None:
            style, settings = vision.style, vision.settings
            require_images_fit(images, settings, self.max_context)
            prompt = prompt.replace(IMAGE, style.wrapped or style.placeholder)
            prompt = expand_prompt(prompt, style, [image.plan for image in images], settings)
        ids = self.tokenizer.encode(prompt, parse_special=True, protected=True)
        if vision is None:
            return ids, ()
        return ids, locate_parts(ids, self.tokenizer.verbatim_ids[style.token], images, settings)

    def prepare_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        structured_outputs: StructuredOutputsParams | None = None,
    ) -> EncodedPrompt:
        """Encode messages; return the prompt's ids, a parser factory and the answer's grammar."""
        plain, images = read_messages(messages)
        try:
            encoded = json.dumps(plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"the messages are not plain JSON: {str(error)[:200]}", "messages") from None
        options = options or ChatOptions()
        guided = self.check_grammar(structured_outputs)
        decoded = list(map(self.decode_image, images))
        prompt = self.encode_chat(self.render_chat(encoded, options), options, guided, decoded)
        if prompt.structured_outputs is None or prompt.structured_outputs is guided:
            return prompt
        return prompt._replace(structured_outputs=self.check_answer_grammar(options, guided, prompt.structured_outputs))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text, with BOS where the file says so; `parse_special` recognises control tokens."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return self.tokenizer.decode(tokens, skip_special=skip_special)

    def apply_chat_template(self, messages: Sequence[Message], **fields: Any) -> str:
        """Return the prompt that the model's chat template makes of messages.

        `tools` and `template_kwargs` are fields too: the tools that the model may call, variables of the template.
        """
        return self.chat_template.render(validate_messages(messages), **fields)

    def tokenize_chat(self, messages: Sequence[Message], **fields: Any) -> list[int]:
        """Return the ids of that prompt. The template's control tokens are parsed; those in a message are text."""
        return self.chat_template.encode(self.tokenizer, messages, **fields)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer that a checkpoint carries, whatever its architecture."""
    if checkpoint.format == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata)
    return tokenizer_from_hf(checkpoint.path)


def check_chat_template(model: TextModel, origin: str | None) -> None:
    """Render a message, so that the first request does not wait for one-time work.

    A template of the user's that cannot render one message is an error; `origin` is the option and the file that it
    came from. One of the model's own only fails chats.
    """
    if not model.has_chat_template:
        return
    try:
        model.tokenize_chat([{"role": "user", "content": "Hello!"}])
    except WorkerError as error:
        if origin is not None:
            raise InvalidRequestError(f"{origin} cannot be used: {error}") from None
        logger.warning("chats may fail: %s", error)
