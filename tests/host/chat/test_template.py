from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from vox_host.chat.rendering import TemplateProblem, compile_template, render
from vox_host.chat.template import ChatTemplate
from vox_host.errors import ModelError, UsageError

CASES = Path(__file__).parents[2] / "cases"
INDEX = json.loads((CASES / "INDEX.json").read_text())
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def template():
    made: list[ChatTemplate] = []

    def make(source: str, **changes) -> ChatTemplate:
        values = {
            "name": 'model "m"',
            "special_tokens": {"bos_token": "<s>"},
            "protect": ["<s>", "<|im_end|>"],
        }
        made.append(ChatTemplate(source, **{**values, **changes}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("case", [c for c in INDEX if c["id"] == "T5"], ids=lambda c: c["file"])
def test_t5_a_hostile_template_is_refused_and_the_next_one_works(template, case):
    chat = template((CASES / case["file"]).read_text(), limit_s=2.0)
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        chat.render(USER)
    assert time.monotonic() - began < 5
    for word in case["expect"]["must_mention"]:
        assert word in caught.value.message
    assert 'model "m"' in caught.value.message
    if "raise" in case["file"]:
        assert caught.value.code == "template-refused"
        assert "roles must alternate" in caught.value.message
    assert template("{{ messages[0].content }}").render(USER).text == "hi"


def test_t5_a_syntax_error_is_reported_at_load_with_its_line(template):
    [case] = [c for c in INDEX if c["file"].endswith("T5_unclosed.jinja")]
    chat = template("first line\n" + (CASES / case["file"]).read_text())
    with pytest.raises(ModelError) as caught:
        chat.check()
    assert caught.value.code == "template-syntax"
    assert "(line 2)" in caught.value.message
    template("fine").check()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ (10 ** 10) ** (10 ** 10) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ ''.format.__self__.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{% set _ = messages[0].update(role='system') %}",
        "{% import 'os' as os %}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_can_neither_hang_nor_grow_nor_reach_out(template, source):
    chat = template(source, limit_s=1.0)
    began = time.monotonic()
    with pytest.raises((UsageError, ModelError), match="template"):
        chat.render(USER)
    assert time.monotonic() - began < 6


def test_templates_know_what_published_ones_use(template):
    source = (
        "{{ bos_token }}{%- for m in messages %}\n"
        "    {%- if loop.index0 == 9 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.role }}:{{ m.content | trim }};{% endgeneration %}"
        "{%- endfor %}{{ tools | tojson }}{{ strftime_now('%Y')|length }}{{ enable_thinking }}"
        "{{ {'a': '<é>'} | tojson(indent=None) }}{{ add_generation_prompt }}"
    )
    text = (
        template(source)
        .render(
            [{"role": "user", "content": " <b> é "}], tools=[{"n": "ü"}], variables={"enable_thinking": False}
        )
        .text
    )
    assert text == '<s>user:<b> é;[{"n": "ü"}]4False{"a": "<é>"}True'


def test_a_variable_of_the_request_does_not_replace_what_the_server_sets(template):
    chat = template("{{ messages[0].content }}{{ bos_token }}{{ tools }}")
    variables = {"messages": [{"content": "forged"}], "bos_token": "x", "tools": "y"}
    assert chat.render(USER, variables=variables).text == "hi<s>None"


def test_one_child_serves_many_renderings_and_a_dead_one_is_replaced(template):
    chat = template("{{ messages[0].content }}")
    chat.render(USER)
    [child] = [p for p in psutil.Process().children() if "rendering.py" in " ".join(p.cmdline())]
    began = time.monotonic()
    for n in range(50):
        assert chat.render([{"role": "user", "content": str(n)}]).text == str(n)
    assert time.monotonic() - began < 2
    assert child.is_running()
    child.kill()
    child.wait(2)
    assert chat.render(USER).text == "hi"
    chat.close()
    assert not [p for p in psutil.Process().children() if "rendering.py" in " ".join(p.cmdline())]


def test_the_child_sees_no_secret_of_the_environment(template, monkeypatch):
    monkeypatch.setenv("VOX_API_KEY", "secret")
    chat = template("x")
    chat.render(USER)
    [child] = [p for p in psutil.Process().children() if "rendering.py" in " ".join(p.cmdline())]
    assert "VOX_API_KEY" not in child.environ()
    assert os.environ["VOX_API_KEY"] == "secret"


def test_rendering_stops_at_its_size_limit():
    with pytest.raises(TemplateProblem, match="more than 100 characters"):
        render(compile_template("{% for i in range(60) %}{{ 'xx' }}{% endfor %}"), {}, limit_chars=100)
