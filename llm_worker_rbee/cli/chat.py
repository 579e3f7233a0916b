"""`llm-worker-rbee chat`: a conversation in the terminal, or line by line from a pipe.

Answers go to standard output, everything else (figures, remarks, errors) to standard error. Ctrl-C stops an answer, and
its text so far stays in the conversation; Ctrl-D, /exit or the end of the input end the command.
"""

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ContextLengthError, WorkerError, counted
from ..generation import Completion
from ..llm import LLM, Stream
from ..progress import supports_ansi
from ..sampling_params import SamplingParams
from ..text_model import EncodedPrompt
from ..tokenizer.chat.template import read_image, start_ahead
from ..weights.hub import cache_dir
from .commands import ChatCommand
from .loading import load_model, start_stream
from .run import DraftStats, ReasoningNotes, draft_stats, figures_line
from .session import NAME, SavedChat, SavedMessage, Session, open_session, sessions_folder
from .terminal import Status, argument_text, columns, decode, note, one_line, stdin_lines, style, visible

HELP = """\
/image FILE     show a picture with the next message
/reset          forget the conversation, keep the system message
/system TEXT    set the system message; alone, show it
/save FILE      write the conversation: Markdown to a .md file, JSON to any other
/help           show this
/exit           end the conversation (Ctrl-D too)
Ctrl-C stops an answer. A line that begins with // is sent with one slash.
A message goes on after a line that ends with \\; pasted lines are one message."""


def chat(options: ChatCommand) -> None:
    """Load the model, and talk until the end of the input."""
    if options.sessions:
        _list_sessions()
        return
    params = options.sampling.params()
    argument_text(options.system or "", "--system")
    with contextlib.nullcontext() if options.session is None else open_session(options.session) as session:
        start_ahead()
        llm = _load(options)
        conversation = Conversation(llm, params, options.system, quiet=options.quiet, session=session)
        conversation.prompt()  # fails here for a model without a template, or one that takes no system message
        is_terminal = sys.stdin.isatty()
        if is_terminal and not options.quiet:
            if not llm.capacity.is_context_reduced:  # else it was printed
                note(str(llm.capacity))
            note(f"{visible(_name(llm))} · context of {llm.max_context:,} tokens · /help lists the commands")
        conversation.show_session(with_last_turn=is_terminal)
        if is_terminal:
            _talk(conversation)
            return
        for line in _piped_lines():
            if not conversation.handle_line(line):
                break


def _list_sessions() -> None:
    """Print the names of the saved sessions, and when each was saved."""
    files = [path for path in sorted(sessions_folder().glob("*.json")) if NAME.fullmatch(path.stem)]
    rows = [[path.stem, time.strftime("%Y-%m-%d %H:%M", time.localtime(path.lstat().st_mtime))] for path in files]
    print("\n".join(columns([["NAME", "SAVED"], *rows])) if rows else "no session is saved: --session NAME begins one")
    note(f"(files in {sessions_folder()})")


def _load(options: ChatCommand) -> LLM:
    """Load the model. A session keeps its keys and values in the user's cache."""
    engine = options.engine
    if options.session is not None and engine.kv_dir is None and not engine.no_prefix_cache:
        folder = cache_dir() / "kv"
        folder.parent.mkdir(parents=True, exist_ok=True)
        engine = replace(engine, kv_dir=str(folder))
    return load_model(options.model, options.computing, Status(), engine)


def _name(llm: LLM) -> str:
    return str(llm.checkpoint.metadata.get("general.name") or llm.checkpoint.path.name)


def _piped_lines() -> Iterator[str]:
    for number, line in stdin_lines():
        text = decode(line, f"line {number}").rstrip("\r\n")
        if text.strip():
            yield text


def _talk(conversation: "Conversation") -> None:
    """Read and answer until the end of the input; an error ends a turn, never the conversation."""
    prompt = _input_prompt()
    while True:
        try:
            line = input(prompt)
            while line.endswith("\\"):  # the message goes on in the next line, as in llama.cpp
                line = f"{line[:-1]}\n{input(prompt)}"
            if line.strip() and not conversation.handle_line(line):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            note("(Ctrl-D or /exit ends the conversation)")
        except WorkerError as error:
            print(f"error: {one_line(str(error))}", file=sys.stderr)


def _input_prompt() -> str:
    """Return the prompt of `input`; for readline, escape codes are marked as zero-width."""
    if not sys.stdout.isatty():
        return ""
    prompt = style("> ", "bold", "green")
    with contextlib.suppress(ImportError):
        import readline

        paste = "on" if supports_ansi(sys.stdout) else "off"  # lines that are pasted are one message
        readline.parse_and_bind(f"set enable-bracketed-paste {paste}")
        return prompt.replace("\x1b[", "\x01\x1b[").replace("m", "m\x02") if "\x1b" in prompt else prompt
    return prompt


class Conversation:
    """The messages so far, and the commands that a line of input may hold."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        *,
        quiet: bool,
        session: Session | None = None,
    ) -> None:
        """With a session, continue it; `system` takes the place of its system message."""
        self.llm = llm
        self.params = params
        self.quiet = quiet
        self.session = session
        saved = SavedChat("", 0, []) if session is None else session.saved
        self.messages: list[SavedMessage] = list(saved.messages)
        self.images: list[str] = []  # of the next message
        self.num_tokens, self.system = saved.tokens, system
        if self.messages and self.messages[0]["role"] == "system":
            first = self.messages.pop(0)["content"]
            self.system = first if system is None else system
        self.commands = {
            "/image": self.add_image,
            "/reset": self.reset,
            "/system": self.set_system,
            "/save": self.save,
            "/help": self.help,
        }

    def handle_line(self, line: str) -> bool:
        """Run a command or answer a message; return False where the line ends the conversation."""
        command, _, rest = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command in self.commands:
            self.commands[command](rest.strip())
        elif line.startswith("/") and not line.startswith("//"):
            note(f"unknown command {visible(command)}: /help lists them, // sends a slash")
        else:
            self.answer(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def all_messages(self) -> list[SavedMessage]:
        """Return the conversation with its system message."""
        system: SavedMessage = {"role": "system", "content": self.system or ""}
        return [system, *self.messages] if self.system else list(self.messages)

    def prompt(self, *follow_ups: str) -> EncodedPrompt:
        """Return the prompt of the conversation with one more message of the user (or an example of one)."""
        texts = follow_ups or ("Hello",)
        messages = [*self.all_messages(), *map(self.message, texts)]
        return self.llm.prepare_chat(messages)

    def message(self, text: str) -> SavedMessage:
        """Return a message of the user, with the pictures that wait for it."""
        plain: SavedMessage = {"role": "user", "content": text}
        return {**plain, "images": self.images} if self.images else plain

    def answer(self, text: str) -> None:
        """Run one turn. A message that cannot be answered is not kept; an answer that was stopped is."""
        before = draft_stats(self.llm)
        try:
            prompt = self.prompt(text)
            stream = start_stream(self.llm, prompt, self.params, is_reduced=True)
        except ContextLengthError as error:
            raise ContextLengthError(f"{error} (/reset starts over)") from None
        answer, stopped = self.print_answer(stream)
        done = stream.so_far()
        reply: SavedMessage = {"role": "assistant", "content": answer}
        if done.reasoning:
            reply["reasoning_content"] = done.reasoning
        self.messages += [self.message(text), reply]
        self.images = []
        self.num_tokens = len(done.prompt_tokens) + len(done.tokens)
        self.save_session()
        self.print_figures(done, stopped, draft_stats(self.llm, before))

    def print_answer(self, stream: Stream) -> tuple[str, bool]:
        """Print an answer as it comes; return (its text, whether Ctrl-C stopped it)."""
        texts: list[str] = []
        status = Status()
        status.show(f"prefill of {counted(len(stream.prompt_tokens), 'token')} ...")
        clean = visible if sys.stdout.isatty() else str
        stopped, reasoning = False, ReasoningNotes()
        try:
            for chunk in stream:
                if chunk.events:
                    reasoning.show(chunk, status)
                if chunk.text:
                    status.clear()
                    print(clean(chunk.text), end="", flush=True)
                    texts.append(chunk.text)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            stopped = True
        finally:
            status.clear()
        print(flush=True)
        return "".join(texts), stopped

    def print_figures(self, completion: Completion, stopped: bool, drafts: DraftStats | None) -> None:
        """Print the figures of an answer, and why it is incomplete if it is."""
        if stopped:
            note("(stopped)")
        elif completion.finish_reason == "length":
            full = len(completion.prompt_tokens) + len(completion.tokens) >= self.llm.max_context
            cut = f"(cut after {counted(len(completion.tokens), 'token')}: --max-tokens allows more)"
            note("(the context is full: /reset starts over)" if full else cut)
        if not self.quiet and not stopped:
            note(figures_line(completion, drafts))

    def show_session(self, *, with_last_turn: bool) -> None:
        """Print what is continued, and the last turn, cut to a line for each message."""
        if self.session is None or self.quiet:
            return
        saved = self.session.saved
        other = f" · so far with {visible(saved.model)}" if saved.model not in ("", _name(self.llm)) else ""
        figures = f"{counted(len(saved.messages), 'message')}, {counted(saved.tokens, 'token')}{other}"
        note(f"session {self.session.name}: {figures if saved.messages else f'new, saved in {self.session.path}'}")
        for message in self.messages[-2:] if with_last_turn else ():
            text = ("> " if message["role"] == "user" else "") + one_line(message["content"])
            note(textwrap.shorten(text, shutil.get_terminal_size().columns, placeholder=" ..."))

    def save_session(self) -> None:
        """Save the conversation, if it is a session."""
        if self.session is not None:
            self.session.write(SavedChat(_name(self.llm), self.num_tokens, self.all_messages()))

    def reset(self, rest: str) -> None:
        self.messages.clear()
        self.num_tokens, self.images = 0, []
        self.save_session()
        note("(the conversation starts over)")

    def add_image(self, rest: str) -> None:
        if not rest:
            note("(/image needs a file name: /image photo.jpg)")
            return
        path = str(Path(rest).expanduser().absolute())
        self.llm.decode_image(read_image(path, rest))  # fails now for a file that cannot be used
        self.images.append(path)
        note("(the picture goes with the next message)")

    def set_system(self, rest: str) -> None:
        if rest:
            before, self.system = self.system, rest
            try:
                self.prompt()
            except WorkerError:
                self.system = before
                raise
            self.save_session()
            note("(the system message is set)")
        else:
            note(f"system: {visible(self.system)}" if self.system else "(there is no system message)")

    def save(self, rest: str) -> None:
        if not rest:
            note("(/save needs a file name: /save talk.md)")
            return
        messages, path = self.all_messages(), Path(rest)
        try:
            path = path.expanduser()
            text = markdown(messages) if path.suffix == ".md" else json.dumps(messages, ensure_ascii=False, indent=2)
            if not _write(path, text.removesuffix("\n") + "\n"):
                note("(not saved)")
                return
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown ~user
            note(f"(cannot write {visible(str(path))}: {getattr(error, 'strerror', None) or error})")
            return
        note(f"(saved {counted(len(messages), 'message')} to {visible(str(path))})")

    def help(self, rest: str) -> None:
        note(HELP)


def _write(path: Path, text: str) -> bool:
    """Write a file, an existing one after a question; return whether it was written."""
    try:
        file = path.open("x", encoding="utf-8", errors="replace")
    except FileExistsError:
        if not _may_replace(path):
            return False
        file = path.open("w", encoding="utf-8", errors="replace")
    with file:
        file.write(text)
    return True


def _may_replace(path: Path) -> bool:
    if not sys.stdin.isatty():
        note(f"({visible(str(path))} exists: give another name)")
        return False
    note(f"{visible(str(path))} exists: replace it? (y/N)")
    try:
        return input(_input_prompt()).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def markdown(messages: Sequence[SavedMessage]) -> str:
    """Return the conversation as a document."""
    return "\n".join(f"**{message['role'].capitalize()}**\n\n{message['content'].strip()}\n" for message in messages)
