"""Chat templates: rendered like transformers, and stopped when they exceed limits."""

import contextlib
import gc
import json
import logging
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from llm_worker_rbee.errors import ChatTemplateError, UnavailableError
from llm_worker_rbee.tokenizer import ChatTemplate, tokenizer_from_gguf
from llm_worker_rbee.tokenizer.chat import template as chat_template
from llm_worker_rbee.weights.gguf import open_gguf

TEMPLATES = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'}}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "gemma": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "mistral": """{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}{{- bos_token }}{%- for message in messages %}
{%- if message["role"] == "user" %}{%- set ns.index = ns.index + 1 %}
{%- if message == user_messages[-1] %}{{- "[LAST]" }}{%- endif %}
{{- "[INST] " ~ message["content"] ~ "[/INST]" }}
{%- elif message["role"] == "assistant" %}
{% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}
{%- else %}{%- continue %}{%- endif %}{%- endfor %}{{- ns.index }}""",
    "qwen3": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string
 and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' if loop.index0 > ns.last_query_index else '' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}""",
    "phi3": """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}""",
    "macros": """{% macro line(text, mark='-') %}{{ mark }} {{ text|upper }}{{ '%s|%05.1f' % ('é', 2.5) }}{% endmacro %}
{% for message in messages %}{{ line(message.content, mark='*'|safe) }}
{{ message|items|list }} {{ message | dictsort | first }} {{ "{} {:>4}".format(message.role, loop.index) }}
{{ loop.cycle('a', 'b') }}{{ [1, 2, 3]|map('string')|join('-') }}
{{ range(3)|list }} {{ message.content[:2] }} {{ 7 // 2 ** 2 }}
{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ {'a': (1, 2.5, none, true)} | tojson }}{{ missing }}""",
}
CHATS: dict[str, list[dict[str, object]]] = {
    "one": [{"role": "user", "content": "Hi <&> \"there\" 'é'?"}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "a\nb  "}],
    "long": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2 "},
        {"role": "user", "content": "3"},
    ],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_render_equals_transformers(name: str, chat: str, generation_prompt: bool) -> None:
    tools = [{"name": "f", "parameters": {"x": "é"}}]
    fields = {"tools": tools, "enable_thinking": False, "date_string": "26 Jul 2024"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    options = {"add_generation_prompt": generation_prompt, **fields}
    expected, _ = render_jinja_template([CHATS[chat]], chat_template=TEMPLATES[name], **options, **tokens)
    assert ChatTemplate(TEMPLATES[name], **tokens).render(CHATS[chat], **options) == expected[0]


@pytest.mark.parametrize("chat", CHATS)
def test_render_template_of_default_model(chat: str, default_model: Path) -> None:
    tokenizer = tokenizer_from_gguf(open_gguf(default_model).metadata)
    assert tokenizer.chat_template is not None
    expected, _ = render_jinja_template(
        [CHATS[chat]], chat_template=tokenizer.chat_template, add_generation_prompt=True, bos_token="<|im_start|>"
    )
    prompt = ChatTemplate(tokenizer.chat_template, bos_token="<|im_start|>").render(CHATS[chat])
    assert prompt == expected[0]
    ids = tokenizer.encode(prompt, parse_special=True)
    assert ids.count(1) == prompt.count("<|im_start|>")
    assert tokenizer.decode(ids, skip_special=False) == prompt


def test_render_strftime_now_is_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]).isdigit()


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDLOOP = "{% endfor %}{% endfor %}"
GROW = "{% set ns = namespace(s='aaaaaaaaaaaaaaaa', l=[1]) %}{% for i in range(60) %}"
SLOW = {
    "nested loops": LOOP + "{% for c in range(9) %}{% endfor %}" + ENDLOOP,
    "tests of a filter": "{% set L = range(60000)|list %}{{ range(60000, 99999)|select('in', L)|list|length }}",
    "tree of namespaces": "{% set ns = namespace(a=namespace(z=1)) %}{% for i in range(40) %}"
    "{% set ns.a = namespace(x=ns.a, y=ns.a) %}{% endfor %}{{ ns.a|string }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
}
BOMBS = {
    "text times number": "{{ 'a' * 10**10 }}",
    "constant": "{% set x = 'a' * 10000000000 %}",
    "number times list": "{{ 10**9 * [0] }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "tilde": GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "plus": GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "list of the same lists": GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "mapping of the same mappings": GROW + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
    "deep nesting": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}"
    "{{ ns.l }}",
    "width as text": "{{ '{:>{}}'.format('a', '5000000000') }}",
    "width from digits": "{{ '{0:>{1}{1}{1}{1}{1}{1}{1}{1}{1}{1}}'.format('a', 9) }}",
    "indent of other line ends": "{{ ('a\\r' * 400000)|indent(10000) }}",
    "join of a generator": "{{ ('a' * 1000000)|select|join('y' * 1000) }}",
    "block": "{% set x %}aaaaaaaaaaaaaaaaaaaaaaaaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "text in loops": LOOP + "x" * 10_000 + ENDLOOP,
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill in a loop": "{% for i in [1] %}{{ 'a'.zfill(10**10) }}{% endfor %}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(10**8) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 1000000).join(['a', 'b'] * 10000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format_map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join filter": "{{ (['a'] * 10000) | join('b' * 1000000) }}",
    "indent filter": "{{ ('a\\n' * 10000) | indent(100000) }}",
    "batch filter": "{{ [1] | batch(10000000000, 'x') | list }}",
    "slice filter": "{{ [1] | slice(10000000000) | list }}",
    "map filter": "{{ range(99999) | map('center', 1000000) | list }}",
    "sum filter": "{{ ([[1] * 99] * 99999) | sum(start=[]) }}",
    "round filter": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "tojson filter": "{{ [[1] * 1000] | tojson(indent=100000000) }}",
    "range": "{{ range(10**9) | list }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
}
INTERNALS = {
    "class": "{{ ''.__class__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format by attr": "{{ ('{0.' ~ '__class__}') | attr('format')(1) }}",
    "map attribute": "{{ [1] | map(attribute='__class__') | list }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "init": "{{ namespace.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
}
BROKEN = {
    "syntax": "{% if %}",
    "unclosed": "{% for a in b %}",
    "unknown filter": "{{ 'a' | nosuch }}",
    "division by zero": "{{ 1 / 0 }}",
    "undefined": "{{ nosuch.field }}",
    "adding": "{{ messages[0].content + 1 }}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "a" * 300_000,
    "raised": "{{ raise_exception('not\nthis') }}",
}


@pytest.mark.parametrize("case", [*SLOW, *BOMBS, *INTERNALS, *BROKEN])
def test_render_malicious_template_raises(case: str) -> None:
    source = {**SLOW, **BOMBS, **INTERNALS, **BROKEN}[case]
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


GROWTH = """
import json, resource, sys
from llm_worker_rbee.errors import ChatTemplateError
from llm_worker_rbee.tokenizer import ChatTemplate
def peak(who): return resource.getrusage(who).ru_maxrss // 1024
before = peak(resource.RUSAGE_SELF)
for source in json.load(sys.stdin):
    try: ChatTemplate(source).render([])
    except ChatTemplateError: pass
print(peak(resource.RUSAGE_SELF) - before, peak(resource.RUSAGE_CHILDREN))
"""


def test_render_memory_bomb_does_not_grow_processes() -> None:
    """Runs in a new process, whose only children are the templates' workers."""
    sources = [BOMBS[name] for name in ("ljust", "join of a generator", "tilde", "tojson filter")]
    command = [sys.executable, "-c", GROWTH]
    done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, check=True, timeout=120)
    own, children = map(int, done.stdout.split())
    assert own < 50
    assert children < 600  # MiB


HONEST = {
    "{{ '{}'.format(1700000000) }}": "1700000000",
    "{{ 'Date 20240726: %s' % 'x' }}": "Date 20240726: x",
    "{{ 'id 123456789 {}'.format('x') }}": "id 123456789 x",
    "{{ '%-6s|' % 'ab' }}{{ 'x' * 3 }}": "ab    |xxx",
}


@pytest.mark.parametrize("source", HONEST)
def test_render_large_format_width_raises(source: str) -> None:
    assert ChatTemplate(source).render([]) == HONEST[source]


def test_chat_template_deleted_ends_its_process() -> None:
    template = ChatTemplate("x")
    child = template._worker
    assert child is not None
    assert child.poll() is None
    del template
    gc.collect()
    assert child.poll() == 0


def test_render_limits_hold_in_another_thread() -> None:
    caught: list[str] = []

    def render() -> None:
        try:
            ChatTemplate(SLOW["nested loops"]).render([])
        except ChatTemplateError as error:
            caught.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(60)
    assert len(caught) == 1
    assert "more than 1 s of processor time" in caught[0]


def test_render_after_error_succeeds() -> None:
    template = ChatTemplate("{% set c = messages[0].content %}{% if c == 'bad' %}{{ 'a' * 10**10 }}{% endif %}{{ c }}")
    with pytest.raises(ChatTemplateError):
        template.render([{"role": "user", "content": "bad"}])
    assert template.render([{"role": "user", "content": "good"}]) == "good"


def test_render_after_process_was_stopped_succeeds() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages %}" + endless + "{% endif %}fine")
    assert template.render([]) == "fine"
    with pytest.raises(ChatTemplateError, match="processor time"):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([]) == "fine"


def test_render_from_threads_gives_each_its_prompt() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(200)))
    assert texts == [str(i) for i in range(200)]


def test_render_long_messages_fit() -> None:
    text = "word " * 400_000
    assert ChatTemplate(TEMPLATES["chatml"]).render([{"role": "user", "content": text}]).count("word") == 400_000


ODD = [[], [{}], [123], [{"role": "unknown", "content": "x"}], [{"role": "user", "content": 3}]]


@pytest.mark.parametrize("messages", ODD)
@pytest.mark.parametrize("name", TEMPLATES)
def test_render_odd_messages_give_text_or_chat_template_error(name: str, messages: list[dict[str, object]]) -> None:
    with contextlib.suppress(ChatTemplateError):
        assert isinstance(ChatTemplate(TEMPLATES[name]).render(messages), str)


def test_render_takes_any_value_under_a_nested_role() -> None:
    message = {"role": "user", "content": "hi", "extra": {"role": {"a": 1}, "b": [{"role": ["user"]}]}}
    assert ChatTemplate("{{ messages[0].content }}").render([message]) == "hi"


def test_render_refusal_of_template_is_invalid_request() -> None:
    with pytest.raises(ChatTemplateError, match="Roles must alternate") as caught:
        ChatTemplate(TEMPLATES["llama2"]).render([{"role": "assistant", "content": "x"}])
    assert (caught.value.status, caught.value.field) == (400, "messages")


def test_render_objects_with_methods_raises() -> None:
    with pytest.raises(ChatTemplateError, match="PosixPath"):
        ChatTemplate("{{ x }}").render([], x=Path("/"))


# A renderer that compiles, and is killed by the first rendering as long as a file exists; else the real one.
KILLED = """
import os, runpy, signal, sys
if not os.path.exists({once!r}):
    runpy.run_path({worker!r}, run_name="__main__")
    sys.exit()
sys.stdin.readline()
print('{{"text": ""}}', flush=True)
sys.stdin.readline()
if {is_once}:
    os.remove({once!r})
os.kill(os.getpid(), signal.{signal})
"""


def killed_renderer(folder: Path, name: str, *, is_once: bool) -> Path:
    """Write the program of a renderer that the signal ends in mid-render."""
    once, script = folder / "once", folder / "renderer.py"
    once.touch()
    worker = str(chat_template.WORKER_SCRIPT)
    script.write_text(KILLED.format(once=str(once), worker=worker, is_once=is_once, signal=name))
    return script


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_render_killed_or_stopped_process_renders_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_WAIT_S", 3.0)
    monkeypatch.setattr(chat_template, "WORKER_SCRIPT", killed_renderer(tmp_path, name, is_once=True))
    monkeypatch.setattr(logging.getLogger("llm_worker_rbee"), "propagate", True)
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "x"}]) == "x"
    records = dict.fromkeys(caplog.records)  # one that reaches two captured loggers is there twice
    assert [record.levelname for record in records] == ["WARNING"]
    how = "did not answer within 3 s" if name == "SIGSTOP" else f"was killed by signal {getattr(signal, name):d}"
    assert f"the process that renders chat templates {how}" in caplog.text


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_render_killed_or_stopped_twice_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The client is not to blame: 503, and a retry may help. A slow template is ended by its processor time alone."""
    monkeypatch.setattr(chat_template, "MAX_WAIT_S", 1.0)
    monkeypatch.setattr(chat_template, "WORKER_SCRIPT", killed_renderer(tmp_path, name, is_once=False))
    with pytest.raises(UnavailableError) as caught:
        ChatTemplate("x").render([])
    assert (caught.value.status, caught.value.retriable) == (503, True)


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
NULL_CONTENT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": CALLS}]


@pytest.mark.parametrize("source", [TEMPLATES["chatml"], "{% for m in messages %}{{ m.content.strip() }}{% endfor %}"])
@pytest.mark.parametrize("absent", [False, True])
def test_render_null_content_that_fails_names_remedy(source: str, absent: bool) -> None:
    last = {name: value for name, value in NULL_CONTENT[1].items() if not (absent and name == "content")}
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render([NULL_CONTENT[0], last])
    assert "messages[1].content is null" in str(caught.value)
    assert '"content": ""' in str(caught.value)
    assert "NoneType" not in str(caught.value)
    assert ChatTemplate(source).render([NULL_CONTENT[0], {**last, "content": ""}])


def test_render_null_content_is_left_to_templates_with_tool_calls() -> None:
    source = "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }};{% endfor %}"
    assert ChatTemplate(source).render(NULL_CONTENT) == "x;f;"
    refusing = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="refused: no tools"):
        ChatTemplate(refusing).render(NULL_CONTENT)


def test_render_failure_without_null_content_says_error() -> None:
    with pytest.raises(ChatTemplateError, match="failed: ZeroDivisionError"):
        ChatTemplate("{{ 1 // 0 }}").render([{"role": "user", "content": "x"}])


def test_render_uses_process_started_ahead() -> None:
    chat_template.start_ahead()
    chat_template.start_ahead()
    (ahead,) = chat_template._ahead
    template = ChatTemplate("{{ messages[0].content }}")
    assert template._worker is ahead
    assert template.render([{"role": "user", "content": "one"}]) == "one"
    assert not chat_template._ahead


def test_render_process_started_ahead_that_ended_is_replaced() -> None:
    chat_template.start_ahead()
    chat_template._ahead[0].stop()
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "one"}]) == "one"
