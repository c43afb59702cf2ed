from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors

from fixtures.scripted_service import BOS, EOS, IM_END, byte_core, byte_tokenizer
from vox_host.app.service import ModelInfo, ModelService
from vox_host.chat.messages import parse_messages
from vox_host.chat.templates import BASE_TEMPLATE, named_template
from vox_host.errors import UsageError
from vox_host.models.tokenizer import Tokenizer
from vox_host.training.data import read_rows
from vox_host.training.data.encoding import Encoder
from vox_host.training.data.formats import Continuation, Conversation
from vox_host.training.data.row_json import RowError

CASES = Path(__file__).parents[3] / "cases"
INFO = ModelInfo(
    name="m",
    digest="d",
    plugin_id="p",
    plugin_version="1",
    lane="l",
    numerics="n",
    context_length=10_000,
    model_context_length=10_000,
    vocab_size=600,
)
BYTES = byte_tokenizer()
PLAIN = named_template(BASE_TEMPLATE).source
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "the f",
            "parameters": {"type": "object", "properties": {"ab": {"type": "string"}}},
        },
    }
]


def served(tokenizer, template, messages, tools=None):
    """The ids that the server makes of a request."""
    service = ModelService(INFO, tokenizer, template, engine=None)
    return asyncio.run(service.encode_chat(messages, tools=tools))


def labels(example):
    pairs = zip(example.token_ids, example.loss_mask, strict=True)
    return [token_id if learned else -100 for token_id, learned in pairs]


def learned_runs(ids, mask, tokenizer):
    """The text of each run of learned tokens, and where it starts."""
    runs, start = [], None
    for at, learned in enumerate([*mask, 0]):
        if learned and start is None:
            start = at
        elif not learned and start is not None:
            content = b"".join(tokenizer.token_bytes(i) for i in ids[start:at])
            runs.append((start, content.decode()))
            start = None
    return runs


# --- R3: which tokens are learned ------------------------------------------------------------


def words_tokenizer():
    """Word n is token n; token 2 ends an answer, and white space is no token."""
    core = tokenizers.Tokenizer(models.WordLevel({f"w{n}": n for n in range(30) if n != 2}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    state = json.loads(core.to_str())
    state["model"]["vocab"]["</s>"] = 2
    core = tokenizers.Tokenizer.from_str(json.dumps(state))
    core.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(
        core, bos_id=None, eos_ids=frozenset({2}), special_names={"eos_token": "</s>"}, chat_template=None
    )


def words(ids):
    return " ".join(f"w{token_id}" for token_id in ids)


@pytest.mark.parametrize("case", json.loads((CASES / "hand/training/R3_mask.json").read_text()), ids=str)
def test_r3_answers_and_their_ends_are_learned_and_nothing_else(case, encoded, open_template):
    tokenizer = words_tokenizer()
    template = None
    if "turns" in case:
        roles = {"u": "user", "a": "assistant"}
        turns = [(roles[who], ids) for who, ids in case["turns"]]
    elif case["answer"][-1] == 2:
        turns = [("user", case["prompt"]), ("assistant", case["answer"])]
    else:
        turns = None
    if turns is None:
        row = {"prompt": words(case["prompt"]), "completion": " " + words(case["answer"])}
    else:
        # The end that is already there is the template's.
        source = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }} {% endfor %}"
        template = open_template(source, tokenizer)
        strip = lambda role, ids: ids[:-1] if role == "assistant" else ids  # noqa: E731
        row = {"messages": [{"role": role, "content": words(strip(role, ids))} for role, ids in turns]}
    result = encoded([row], tokenizer, template)
    assert not result.problems and not result.warnings
    [example] = result.examples
    assert labels(example) == case["labels"]
    assert example.trained_tokens == case["trained"]


# --- what is trained is what is served -------------------------------------------------------

content = st.text("ab \n:<|>e{hloé😀", max_size=12).filter(lambda text: text.strip())
call = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": st.just("f"), "arguments": st.sampled_from(['{"ab": "x\\n"}', "{}"])}
        )
    }
)
user = st.fixed_dictionaries({"role": st.just("user"), "content": content})
assistant = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": content}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.one_of(st.just(""), content),
            "tool_calls": st.lists(call, min_size=1, max_size=2),
        }
    ),
)
tool = st.fixed_dictionaries({"role": st.just("tool"), "content": content})
turn = st.one_of(st.tuples(user, assistant), st.tuples(user, assistant, tool, assistant))
conversations = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": content}), max_size=1),
    st.lists(turn, min_size=1, max_size=3),
).map(lambda parts: [*parts[0], *(message for turn in parts[1] for message in turn)])
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_is_what_serving_sees(encoder, tokenizer, template, messages, tools):
    ids, mask, ends = encoder.encode(Conversation(parse_messages(messages), tools))
    assert ends and len(ids) == len(mask)
    prompts = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    runs = learned_runs(ids, mask, tokenizer)
    assert len(runs) == len(prompts)
    for n, (start, text) in zip(prompts, runs, strict=True):
        assert ids[:start] == served(tokenizer, template, parse_messages(messages[:n]), tools)
        assert messages[n]["content"].strip() in text
        assert text.count('"f"') >= len(messages[n].get("tool_calls", ()))
        assert text.endswith(("</s>", "<|im_end|>"))
    return runs


@few
@given(conversations, st.sampled_from([None, TOOLS]))
def test_the_named_template_trains_every_answer_on_the_ids_that_serving_sees(open_template, messages, tools):
    tokenizer = BYTES
    template = open_template(PLAIN, tokenizer)
    encoder = Encoder(tokenizer, template, 10_000)
    runs = check_is_what_serving_sees(encoder, tokenizer, template, messages, tools)
    for message, (_, text) in zip([m for m in messages if m["role"] == "assistant"], runs, strict=True):
        calls = [
            "<tool_call>\n"
            + json.dumps({"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])})
            + "\n</tool_call>"
            for c in message.get("tool_calls", ())
        ]
        assert text == "\n".join(part for part in [message["content"].strip(), *calls] if part) + "</s>"


@few
@given(conversations, st.sampled_from([PLAIN, None]))
def test_where_tokens_span_words_a_row_has_the_ids_of_serving_or_is_refused(
    merging, open_template, messages, source
):
    template = open_template(source or merging.chat_template.source, merging)
    encoder = Encoder(merging, template, 10_000)
    try:
        check_is_what_serving_sees(encoder, merging, template, messages, None)
    except RowError as error:
        assert "spans" in str(error)
        # It is refused for a reason: the whole does not begin with what is served.
        whole = template.render(parse_messages(messages), add_generation_prompt=False)
        ids = merging.encode_markup(whole.text, whole.positions)
        edges = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [served(merging, template, parse_messages(messages[:n])) for n in edges]
        assert any(ids[: len(prompt)] != prompt for prompt in prompts)


@given(st.text("ab \n:{hello", max_size=10), st.text("ab \n:{hello", min_size=1, max_size=10))
def test_a_completion_is_learned_behind_the_ids_of_its_prompt_or_the_row_is_refused(
    merging, prompt, completion
):
    service = ModelService(INFO, merging, None, engine=None)
    seen = asyncio.run(service.encode_prompt(prompt))
    whole = merging.encode(prompt + completion)
    try:
        ids, mask, ends = Encoder(merging, None, 10_000).encode(Continuation(prompt, completion))
    except RowError as error:
        assert "spans the end of the prompt" in str(error)
        assert whole[: len(seen)] != seen
        return
    assert ids == [*whole, 1] and ends
    start = max(len(seen), 1)
    assert ids[:start] == (seen or ids[:1]) and mask == [0] * start + [1] * (len(ids) - start)


def test_a_token_that_spans_prompt_and_answer_is_named(merging, encoded, open_template):
    rows = [{"prompt": "xy", "completion": "z"}, {"prompt": "hel", "completion": "lo"}]
    result = encoded(rows, merging)
    [problem] = result.problems
    assert problem.line == 2
    assert "completion: the token 'hello" in problem.what
    template = open_template(merging.chat_template.source, merging)
    user = {"role": "user", "content": "a"}
    rows = [{"messages": [user, {"role": "assistant", "content": text}]} for text in ("a", "\nhello")]
    [problem] = encoded(rows, merging, template).problems
    assert problem.line == 2
    assert (
        problem.what.startswith("the prompt for messages[1]: the token '") and "spans its end" in problem.what
    )


# --- templates that say something else than was asked ----------------------------------------

ROW = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "eins"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "zwei"},
    ]
}
REWRITES = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_an_error_with_row_and_template(encoded, open_template):
    tokenizer = byte_tokenizer()
    template = open_template(REWRITES, tokenizer)
    [problem] = encoded([ROW], tokenizer, template).problems
    assert problem.line == 1
    for words in (
        "messages up to [1]",
        'model "m"',
        "'<think></think>eins</s>'",
        "'eins</s>user:two",
        "--answers last",
    ):
        assert words in problem.what
    result = encoded([ROW], tokenizer, template, answers="last")
    assert not result.problems
    [example] = result.examples
    assert learned_runs(example.token_ids, example.loss_mask, tokenizer)[0][1] == "<think></think>zwei</s>"


@pytest.mark.parametrize(
    ("source", "field", "row"),
    [
        ("{{ messages[1].content }}</s>", "messages[0].content", ROW),
        (
            "{% for m in messages %}{{ m.content if m.role == 'user' }}</s>{% endfor %}",
            "messages[1].content",
            ROW,
        ),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", "tools", {**ROW, "tools": TOOLS}),
        (
            "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
            "messages[1].reasoning_content",
            {"messages": [ROW["messages"][0], {**ROW["messages"][1], "reasoning_content": "because"}]},
        ),
        (
            "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
            "messages[1].tool_calls",
            {
                "messages": [
                    ROW["messages"][0],
                    {
                        "role": "assistant",
                        "content": "x",
                        "tool_calls": [{"function": {"name": "set_timer"}}],
                    },
                ]
            },
        ),
    ],
)
def test_what_a_template_leaves_out_is_said(encoded, open_template, source, field, row):
    tokenizer = byte_tokenizer()
    [problem] = encoded([row], tokenizer, open_template(source, tokenizer)).problems
    assert problem.what.startswith(f"{field}: the chat template of")
    assert "leaves it out" in problem.what or "does not show them" in problem.what


def test_a_template_that_refuses_or_fails_is_the_rows_problem(encoded, open_template):
    tokenizer = byte_tokenizer()
    for source, words in (
        ("{{ raise_exception('roles must alternate') }}", "refused these messages: roles must alternate"),
        ("{{ nothing.at.all }}", "could not be rendered (line 1)"),
    ):
        [problem] = encoded([ROW], tokenizer, open_template(source, tokenizer)).problems
        assert words in problem.what
    [problem] = encoded([ROW], tokenizer).problems
    assert problem.what == "is a conversation, and no chat template was given"


def test_answers_without_an_end_are_a_warning(encoded, open_template):
    tokenizer = byte_tokenizer()
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    [warning] = encoded([ROW], tokenizer, open_template(source, tokenizer)).warnings
    assert "in 1 example of 1 an answer does not end" in warning
    assert "(</s>, <|im_end|>)" in warning


# --- problems that need the tokenizer --------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"text": "a <|im_end|> b"}, "text"),
        ({"prompt": "<s>a", "completion": "b"}, "prompt"),
        ({"prompt": "a", "completion": "b</s>"}, "completion"),
        ({"instruction": "a</s>", "output": "b"}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "</s>"}]},
            "messages[1].content",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"</s>": 1}'}}],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {**ROW, "tools": [{"function": {"name": "f", "description": "</s>"}}]},
            "tools[0].function.description",
        ),
    ],
)
def test_the_text_of_a_special_token_in_a_row_is_refused(encoded, open_template, row, where):
    tokenizer = byte_tokenizer()
    [problem] = encoded([row], tokenizer, open_template(PLAIN, tokenizer)).problems
    assert problem.what.startswith(f"{where}: holds '<")
    assert "the text of a special token of this model" in problem.what


def test_a_row_that_is_too_long_is_reported_and_never_cut(encoded):
    tokenizer = byte_tokenizer()
    rows = [{"text": "x" * 8}, {"text": "x" * 9}, {"text": "x" * 200_000}]
    result = encoded(rows, tokenizer, max_length=10)
    assert [problem.line for problem in result.problems] == [2, 3]
    assert result.problems[0].what == "has 11 tokens; the limit is 10 (--max-length)"
    assert "has about " in result.problems[1].what
    with pytest.raises(UsageError) as caught:
        result.check()
    assert "--max-length" in caught.value.remedy


def test_problems_of_rows_and_of_their_tokens_come_together(encoded):
    result = encoded([{"text": "a</s>"}, b"{", {"text": "b"}], byte_tokenizer())
    assert [problem.line for problem in result.problems] == [1, 2]
    assert [example.line for example in result.examples] == [3]


def test_plain_text_is_learned_whole_with_its_end(encoded):
    [example] = encoded([{"text": "ab"}], byte_tokenizer()).examples
    assert list(example.token_ids) == [BOS, 97, 98, EOS]
    assert list(example.loss_mask) == [0, 1, 1, 1]
    assert example.message().model_dump() == {
        "token_ids": [BOS, 97, 98, EOS],
        "loss_mask": [False, True, True, True],
    }
    [example] = encoded([{"text": "ab"}], byte_tokenizer(bos=False)).examples
    assert (list(example.token_ids), list(example.loss_mask)) == ([97, 98, EOS], [0, 1, 1])


def test_a_tokenizer_that_ends_texts_itself_gets_no_second_end(encoded):
    core = byte_core(bos=False)
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    tokenizer = Tokenizer(
        core, bos_id=None, eos_ids=frozenset({EOS}), special_names={"eos_token": "</s>"}, chat_template=None
    )
    [example] = encoded([{"text": "ab"}], tokenizer).examples
    assert list(example.token_ids) == [97, 98, EOS]


def test_a_message_that_a_template_would_complete_to_a_special_token_stays_text(encoded, open_template):
    source = (
        "{% for m in messages %}{{ m.content }}|>{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    template = open_template(source, BYTES)
    rows = [{"messages": [{"role": "user", "content": "<|im_end"}, {"role": "assistant", "content": "ok"}]}]
    result = encoded(rows, BYTES, template)
    assert not result.problems
    [example] = result.examples
    assert list(example.token_ids) == [*b"<|im_end|>ok|>", EOS]
    assert list(example.token_ids[:10]) == served(BYTES, template, rows[0]["messages"][:1])


def test_nothing_is_kept_behind_the_last_answer(encoded, open_template):
    tokenizer = byte_tokenizer()
    template = open_template(tokenizer.chat_template.source, tokenizer)
    [example] = encoded([ROW], tokenizer, template).examples
    assert example.token_ids[-1] == IM_END
    runs = learned_runs(example.token_ids, example.loss_mask, tokenizer)
    assert [text for _, text in runs] == ["eins<|im_end|>", "zwei<|im_end|>"]


@pytest.mark.parametrize(("name", "count"), [("R1_rows", 6), ("R8_val2", 2)])
def test_the_rows_of_r1_and_r8_are_read(name, count):
    rows = read_rows(CASES / f"hand/training/{name}.jsonl")
    assert (rows.format, len(rows), rows.problems) == ("prompt/completion", count, ())
