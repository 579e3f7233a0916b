"""What the chat page does with answers, in a real browser; the answers are played by the tests."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.chat_page import FAKE_STREAM, ask, give, opened, press, reply, setup
from tests.helpers.server import Server, until

STORED = "llm-worker-rbee.chat."  # and the id of a conversation
LATE_WRITE = f"""const key = Object.keys(localStorage).find(key => key.startsWith("{STORED}"));
window.dispatchEvent(new StorageEvent("storage", {{key, newValue: localStorage.getItem(key)}}));
"""  # the browser may report the last write of a page after its reload
LINK = "https://example.org"


def test_page_folds_reasoning_and_renders_only_what_is_new(browser: Any, server: Server) -> None:
    with opened(browser, server, script=FAKE_STREAM) as page:
        ask(page, "think")
        give(page, {"role": "assistant", "content": ""}, {"reasoning_content": "First *this*"}, {"reasoning": ", then"})
        page.wait_for_selector(".reasoning[data-thinking]:not([open]) summary")
        give(page, {"content": "# Title\n\nfirst"}, {"content": " half"})
        page.wait_for_selector(".content p")
        page.eval_on_selector(".content h1", "title => { title.isKept = true; }")
        give(page, {"content": " and **second**\n\n```py\nx = 1"})
        page.wait_for_selector(".content pre")
        page.eval_on_selector(".content pre", "code => { code.isKept = true; }")
        give(page, {"content": "  # one\ny"})
        until(lambda: page.evaluate("document.querySelector('.content pre').textContent.endsWith('y')"))
        assert page.evaluate("['h1', 'pre'].every(tag => document.querySelector('.content ' + tag).isKept)")
        give(page, {"content": " = 2\n```\n"}, finish="stop")
        assert page.inner_text(".content pre") == "x = 1  # one\ny = 2"
        assert page.inner_text(".content .hl-c") == "# one"
        assert page.inner_html(".content p") == "first half and <strong>second</strong>"
        assert not page.is_visible(".reasoning .prose")
        page.click(".reasoning summary")
        until(lambda: page.inner_html(".reasoning .prose") == "<p>First <em>this</em>, then</p>")
        note = page.inner_text(".note")
        assert note.startswith("7 tokens (3 of reasoning)")
        assert note.endswith("prompt of 9 (4 cached)")
        reply(page, "next", "ok")
        messages = page.evaluate("sent.at(-1).messages")
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[1]["reasoning_content"] == "First *this*, then"


def test_page_shows_tool_calls_and_sends_results(browser: Any, server: Server) -> None:
    with opened(browser, server, script=FAKE_STREAM) as page:
        setup(page, tools='[{"name": ')
        assert "not valid JSON" in page.inner_text("#tools-problem")
        ask(page, "weather?")
        assert page.evaluate("sent.length") == 0
        assert page.evaluate("document.activeElement.name") == "tools"
        setup(page, tools='[{"name": "weather"}]')
        page.select_option("[name=tool_choice]", "required")
        assert page.is_hidden("#tools-problem")
        assert page.inner_text("#chips") == "1 tool"
        page.press("#text", "Enter")
        first, second = (
            {"index": i, "id": f"call_{i}", "function": {"name": "weather", "arguments": ""}} for i in (0, 1)
        )
        give(page, {"tool_calls": [first]}, {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":"Ur'}}]})
        page.wait_for_selector(".call")
        assert page.locator(".call textarea").count() == 0  # not before it is complete
        rest = {"index": 0, "function": {"arguments": 'k", "n": 12345678901234567890}'}}
        give(page, {"tool_calls": [rest]}, {"tool_calls": [second]}, finish="tool_calls")
        shown = page.locator(".call pre").all_inner_texts()
        assert shown == ['{\n  "city": "Urk",\n  "n": 12345678901234567890\n}', ""]
        assert "arguments are not complete JSON" in page.inner_text(".call >> nth=1")
        page.locator(".call textarea").nth(0).fill("sunny")
        press(page, "Send the results")
        give(page, {"content": "It is sunny."}, finish="stop")
        request = page.evaluate("sent[1]")
        assert request["tools"] == [{"type": "function", "function": {"name": "weather"}}]
        assert request["tool_choice"] == "required"
        calls, *results = request["messages"][1:]
        assert (calls["content"], [call["id"] for call in calls["tool_calls"]]) == (None, ["call_0", "call_1"])
        assert calls["tool_calls"][0]["function"]["arguments"] == '{"city":"Urk", "n": 12345678901234567890}'
        assert results == [
            {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
            {"role": "tool", "tool_call_id": "call_1", "content": ""},
        ]
        assert page.locator(".call").nth(0).locator("pre").nth(1).inner_text() == "sunny"
        page.click("#chips button")
        assert "tools" not in reply(page, "thanks", "ok")


def test_page_sends_schema_and_sampling_settings(browser: Any, server: Server) -> None:
    with opened(browser, server, script=FAKE_STREAM) as page:
        page.click("#examples >> text=Extract data as JSON")
        assert "jars of honey" in page.input_value("#text")
        setup(page, schema="[1]")
        assert page.inner_text("#schema-problem") == "A JSON schema is an object: {…}."
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        setup(page, schema=json.dumps(schema), top_p=0.5, top_k=4, min_p=0.1, seed=7, temperature=0, max_tokens=9)
        page.select_option("[name=reasoning_effort]", "low")
        setup(page, system=" Be brief ", stop="a\nb")
        request = reply(page, "go", '{"n":1,"list":[]}')
        messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "go"}]
        form = {"name": "answer", "schema": schema, "strict": True}
        assert request == {
            "messages": messages, "stream": True, "stream_options": {"include_usage": True}, "top_p": 0.5, "top_k": 4,
            "min_p": 0.1, "seed": 7, "temperature": 0, "max_tokens": 9, "reasoning_effort": "low", "stop": ["a", "b"],
            "response_format": {"type": "json_schema", "json_schema": form},
        }  # fmt: skip
        assert page.inner_text(".content pre") == '{\n  "n": 1,\n  "list": []\n}'


def test_page_keeps_several_conversations(browser: Any, server: Server) -> None:
    titles = "#conversations .open"
    with opened(browser, server, script=FAKE_STREAM) as page:
        reply(page, "about bees", "honey")
        page.click("#new")
        ask(page, "about whales")
        give(page, {"content": "kri"})
        page.locator(titles, has_text="bees").click()  # the other answer goes on
        assert page.inner_text(".content.prose") == "honey"
        assert page.locator("#conversations .running").count() == 1
        page.evaluate("give({content: 'll'}); endStream('stop', null); window.stream = null;")
        page.wait_for_selector("#conversations:not(:has(.running))")
        page.fill("#search", "KRILL")
        assert page.locator(titles).all_inner_texts() == ["about whales"]
        page.locator(titles).click()
        assert page.inner_text(".content.prose") == "krill"
        press(page, "Rename: about whales")
        page.keyboard.type("Oceans")
        page.keyboard.press("Enter")
        page.fill("#search", "")
        page.select_option("#theme", "dark")
        page.reload()
        page.wait_for_selector("[data-status=healthy]")
        assert page.locator(titles).all_inner_texts() == ["Oceans", "about bees"]
        assert page.inner_text(".content.prose") == "krill"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 21, 19)"
        press(page, "Delete: Oceans")
        assert page.locator(titles).all_inner_texts() == ["about bees"]
        press(page, "Undo")
        assert page.inner_text(".content.prose") == "krill"
        page.click("#delete-all")
        assert page.evaluate(f"Object.keys(localStorage).filter(key => key.startsWith('{STORED}'))") == []


def test_page_edit_and_retry_branch_the_conversation(browser: Any, server: Server) -> None:
    with opened(browser, server, script=FAKE_STREAM, permissions=["clipboard-read", "clipboard-write"]) as page:
        reply(page, "one", "first\n```\ncode\n```")
        page.click(".code button")
        assert page.evaluate("navigator.clipboard.readText()") == "code"
        press(page, "Copy")
        until(lambda: page.evaluate("navigator.clipboard.readText().then(text => text.startsWith('first'))"))
        press(page, "Try again")
        give(page, {"content": "second"}, finish="stop")
        reply(page, "two", "third")
        assert [m["content"] for m in page.evaluate("sent.at(-1).messages")] == ["one", "second", "two"]
        page.hover("article.user >> nth=0")
        page.get_by_role("button", name="Edit").first.click()
        page.fill("article textarea", "uno")
        page.press("article textarea", "Enter")
        give(page, {"content": "primo"}, finish="stop")
        assert page.evaluate("sent.at(-1).messages") == [{"role": "user", "content": "uno"}]
        assert page.locator("article .content").all_inner_texts() == ["uno", "primo"]
        page.hover("article.user >> nth=0")
        page.get_by_role("button", name="Previous version").first.click()
        assert page.locator("article .content").all_inner_texts() == ["one", "second", "two", "third"]
        page.locator("article.assistant").first.get_by_role("button", name="Previous version").click()
        assert page.locator("article").count() == 2
        assert page.inner_text("article.assistant pre") == "code"


def test_page_reports_errors_and_keeps_what_arrived(browser: Any, server: Server) -> None:
    with opened(browser, server, script=FAKE_STREAM) as page:
        ask(page, "one")
        give(page, {"content": "partial"})
        page.wait_for_selector("text=partial")
        page.evaluate("stream.error(new TypeError('network error')); window.stream = null;")
        page.wait_for_selector("text=The connection was lost before the answer ended.")
        assert page.inner_text(".content.prose") == "partial"
        ask(page, "two")
        until(lambda: page.evaluate("!!window.stream"))
        page.evaluate("push(JSON.stringify({error: {message: 'no token left', code: 'GRAMMAR_DEAD_END'}}))")
        page.wait_for_selector("text=no token left")
        assert "change the schema" in page.inner_text(".failure >> nth=1")
        page.fill("#text", "three")
        page.press("#text", "Shift+Enter")
        page.keyboard.type("lines")
        page.evaluate("window.stream = null")
        page.press("#text", "Enter")
        give(page, {"content": "cut `short`\n```py\nif"})
        page.wait_for_selector(".content pre")
        page.reload()
        page.wait_for_selector("text=interrupted: the page was closed")
        page.evaluate(LATE_WRITE)
        assert page.inner_text("article.assistant >> nth=2 >> .note") == "interrupted: the page was closed"
        assert page.inner_text("article.user >> nth=2 >> .content") == "three\nlines"
        assert page.inner_text("article.assistant >> nth=2 >> .hl-k") == "if"
    with opened(browser, server) as page:
        busy = {"error": {"message": "the queue is full", "code": "QUEUE_FULL"}}
        refuse = {"status": 429, "headers": {"retry-after": "3"}, "json": busy}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**refuse))
        ask(page, "three")
        page.wait_for_selector("text=the queue is full")
        assert "try again in 3 s" in page.inner_text(".failure")


def test_page_works_with_damaged_or_full_storage(browser: Any, server: Server) -> None:
    cycle = {"a": {"id": "a", "parent": "a", "role": "user", "content": ""}}
    bad = {"x": "{", "y": "[]", "z": json.dumps({"id": "z", "title": "", "leaf": "a", "messages": cycle})}
    script = f"""
    for (const [id, text] of Object.entries({json.dumps(bad)})) localStorage.setItem("{STORED}" + id, text);
    localStorage.setItem("llm-worker-rbee.settings", "5");
    Storage.prototype.setItem = () => {{ throw new DOMException("full", "QuotaExceededError"); }};
    """
    with opened(browser, server, script=script + FAKE_STREAM) as page:
        assert "3 stored conversations cannot be read." in page.inner_text("#toast")
        press(page, "Remove")
        assert page.evaluate("localStorage.length") == 1
        reply(page, "hello", "there")
        assert "storage is full" in page.inner_text("#toast")
        page.click("#new")
        page.click("#conversations .open")
        assert page.inner_text(".content.prose") == "there"


MARKDOWN = [  # and the HTML of what it becomes, where that is compared
    (
        "**a** *b* ***c*** ~~d~~ `e *f*` \\*g",
        "<p><strong>a</strong> <em>b</em> <strong><em>c</em></strong> <s>d</s> <code>e *f*</code> *g</p>",
    ),
    ("snake_case 2*3*4 **open", "<p>snake_case 2*3*4 **open</p>"),
    ("<i>x</i>\ny<br>z", "<p>&lt;i&gt;x&lt;/i&gt;<br>y<br>z</p>"),
    ("[a](javascript:alert(1)) [b](data:,x)", "<p>[a](javascript:alert(1)) [b](data:,x)</p>"),
    (
        "- a\n  1. b\n\n     c\n- d\n\ntext",
        '<ul><li>a<ol start="1"><li><p>b</p><p>c</p></li></ol></li><li>d</li></ul><p>text</p>',
    ),
    (
        "> q\n> > r\n\n---\n### h ###",
        "<blockquote><p>q</p><blockquote><p>r</p></blockquote></blockquote><hr><h3>h</h3>",
    ),
    ("1. a\n   ```\n   x\n     y\n   ```\n2. b", None),
    ("t\n|a|b\\|c|\n|--|:-:|\n|1|`2`|\n\nend", None),
    ("~~~\n```\n<b>\n~~~\n```js\nlet a = '</b>' // c\n```", None),
    ("# \n-\n1)\n>\n```", None),
]


def test_page_renders_markdown_safely(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        render = "text => element('div', {}, ...renderBlocks(text.split('\\n'))).innerHTML"
        shown = [(text, page.evaluate(render, text)) for text, expected in MARKDOWN if expected is not None]
        assert shown == [pair for pair in MARKDOWN if pair[1] is not None]
        link = page.evaluate(render, f"[*a*]({LINK}/a_(b)) and <{LINK}>, ({LINK}/c).")
        assert link.count(f'<a href="{LINK}') == link.count('target="_blank" rel="noopener noreferrer"') == 3
        assert [f'href="{LINK}/{path}"' in link for path in ("a_(b)", "c")] == [True, True]
        table = page.evaluate(render, "|a|b\\|c|\n|--|:-:|\n|1|`2`|3|\n\nend")
        assert '<th class="">a</th><th class="center">b|c</th>' in table
        assert '<td class="center"><code>2</code></td></tr>' in table


def test_page_renders_growing_markdown_as_whole_one(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        whole, grown = page.evaluate(
            """text => {
              const [whole, grown] = [1, 2].map(() => new MarkdownView("prose"));
              for (let i = 1; i <= text.length; i++) grown.update(text.slice(0, i));
              whole.update(text);
              return [whole.root.innerHTML, grown.root.innerHTML];
            }""",
            "\n\n".join(text for text, _ in MARKDOWN),
        )
        assert whole == grown
        hostile = [
            *"*_`[<#>-|",
            "**a ",
            "*a ",
            "[a](",
            "- ",
            "> ",
            "`a``",
            "1. ",
            "|-",
            "~~a",
            "<h",
            "\n- \n",
            "  - \n",
        ]
        render = "texts => texts.forEach(text => renderBlocks(text.repeat(20000).split('\\n')))"
        page.evaluate(render, hostile)  # ends
        page.evaluate(
            "texts => texts.forEach(text => highlight(text.repeat(20000), 'js'))", ["/*", "'", '"', "`", "a("]
        )
