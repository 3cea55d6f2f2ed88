"""The generator against a reader of its texts that knows nothing of how they are made."""

import hashlib
import random
import re

import pytest

from kvjax.train.reasoner import task, vocabulary
from kvjax.train.reasoner.task import problem

NAME = r"[a-z]\d"
LEVELS = (200, 500, 1000)


def text_of(found: task.Problem) -> tuple[str, str]:
    words = vocabulary.decode(found.tokens)
    prompt = vocabulary.decode(found.tokens[: found.prompt])
    return prompt, words[len(prompt) :]


def right_values(prompt: str) -> dict[str, int]:
    """The value of every quantity, by the prompt alone."""
    given, notes = prompt.split(" Notes : ")
    formulas = dict(re.findall(rf"({NAME}) = (.*?) \.", given))
    formulas |= dict(re.findall(rf"({NAME}) should be (.*?) \.", notes))
    values: dict[str, int] = {}

    def value(name: str) -> int:
        if name not in values:
            filled = re.sub(NAME, lambda found: str(value(found[0])), formulas[name])
            values[name] = eval(filled) % 100
        return values[name]

    return {name: value(name) for name in formulas}


def problems(count: int, levels=LEVELS):
    return [problem(level, index) for level in levels for index in range(count)]


def test_is_the_same_whenever_it_is_asked_for():
    assert problem(500, 7) == problem(500, 7)
    others = [problem(500, 8), problem(500, 7, split="train"), problem(500, 7, seed=1)]
    assert all(problem(500, 7) != other for other in others)


def test_stays_the_same_from_version_to_version():
    """A change here asks for a new model."""
    tokens = bytes(b for token in problem(500, 1).tokens for b in token.to_bytes(2, "big"))
    assert hashlib.sha256(tokens).hexdigest()[:16] == "91f8392e05f20aa2"


def test_the_answer_is_right():
    for found in problems(60):
        prompt, trace = text_of(found)
        target = re.search(rf"find ({NAME}) for the answer \.$", prompt)[1]
        assert right_values(prompt)[target] == found.answer == task.answer_of(found.tokens)
        assert trace.endswith(f"The answer is {found.answer} . <eos>")


def test_all_that_the_trace_states_is_right():
    for found in problems(40):
        prompt, trace = text_of(found)
        values = right_values(prompt)
        stated = re.findall(rf"({NAME}) is (\d+)", trace)
        assert stated and all(values[name] == int(value) for name, value in stated)


def test_the_trace_calculates_right_and_takes_back_what_the_notes_correct():
    wrong_turns = 0
    for found in problems(40):
        prompt, trace = text_of(found)
        values = right_values(prompt)
        steps = re.findall(
            rf"({NAME}) = (?:{NAME} [-+*] [^=]*?) = (\d+ [-+*] \d+) = (\d+) \."
            rf"( So {NAME} \? \n\n Wait)?",
            trace,
        )
        for name, filled, result, taken_back in steps:
            assert eval(filled) % 100 == int(result)
            if int(result) != values[name]:
                assert taken_back
                wrong_turns += 1
    assert wrong_turns > 50


def test_nothing_is_used_before_it_is_known():
    for found in problems(20):
        _, trace = text_of(found)
        solved = set()
        for before, name in re.findall(rf"(Yes ,|Recall|So|Now|,) ({NAME}) is", trace):
            assert before in ("So", "Now") or name in solved
            solved.add(name)
        asked = re.findall(rf"Find ({NAME}) for", trace)
        assert len(asked) == len(set(asked))


def test_the_prompt_does_not_tell_the_answer():
    found = problems(300, (1000,))
    prompts = [set(re.findall(r"\d+", text_of(each)[0])) for each in found]
    own = sum(str(each.answer) in numbers for each, numbers in zip(found, prompts, strict=True))
    shuffled = random.Random(0).sample(prompts, len(prompts))
    other = sum(str(each.answer) in numbers for each, numbers in zip(found, shuffled, strict=True))
    assert abs(own - other) < 40  # three standard deviations of the difference
    for each in found:
        target = re.search(rf"find ({NAME}) for", text_of(each)[0])[1]
        assert re.search(rf"{target} = {NAME} [-+] {NAME}", text_of(each)[0])
    answers = [each.answer for each in found]
    assert max(map(answers.count, answers)) < 15


@pytest.mark.parametrize("level", task.WIDTHS)
def test_has_as_many_tokens_as_its_level_says(level):
    for index in range(20 if level < 2000 else 5):
        found = problem(level, index)
        trace = len(found.tokens) - found.prompt
        assert abs(trace - level) <= task.TOLERANCE * level
        assert len(found.tokens) <= task.WIDTHS[level]
        assert len(found.kinds) == len(found.tokens)


def test_every_paragraph_is_of_the_kind_that_it_begins_like():
    beginnings = {
        task.PROMPT: "<bos> Given",
        task.REASONING: "\n\n (We need|So far)",
        task.EXECUTION: f"\n\n ({NAME} =|Back to)",
        task.TRANSITION: "\n\n Wait ,",
        task.ANSWER: "\n\n The answer",
    }
    seen = set()
    for found in problems(20):
        starts = [0, *(i for i, t in enumerate(found.tokens) if t == vocabulary.BREAK)]
        for start, end in zip(starts, [*starts[1:], len(found.tokens)], strict=True):
            [kind] = set(found.kinds[start:end])
            assert re.match(beginnings[kind], vocabulary.decode(found.tokens[start:end]))
            seen.add(kind)
        assert found.kinds.index(task.REASONING) == found.prompt
    assert seen == set(beginnings)


def test_thoughts_are_long_and_kinds_are_common():
    found = problems(100, (1000,))
    kinds = [kind for each in found for kind in each.kinds[each.prompt :]]
    for kind, least in ((task.REASONING, 0.25), (task.EXECUTION, 0.4), (task.TRANSITION, 0.08)):
        assert kinds.count(kind) > least * len(kinds)
        paragraphs = sum(
            each.kinds[i] == kind
            for each in found
            for i, token in enumerate(each.tokens)
            if token == vocabulary.BREAK
        )
        assert kinds.count(kind) / paragraphs > 40


def test_long_problems_need_a_value_from_long_ago():
    for found in problems(20, (1000, 2000)):
        assert max(found.reads) > 0.6 * (len(found.tokens) - found.prompt)


def test_reads_count_the_tokens_since_a_value_was_last_stated():
    for found in problems(5):
        trace = found.tokens[found.prompt :]
        reads, last = [], {}
        for i in range(len(trace) - 2):
            words = [vocabulary.WORDS[token] for token in trace[max(i - 2, 0) : i + 3]]
            name = vocabulary.WORDS[trace[i]]
            if re.fullmatch(NAME, name) and vocabulary.WORDS[trace[i + 1]] == "is":
                if i >= 2 and words[1] == "Recall" and not _corrected(trace, i):
                    reads.append(i - last[name])
                last[name] = i
        assert tuple(reads) == found.reads


def _corrected(trace, i: int) -> bool:
    """In a correction values are stated again, which were looked up before the wrong turn."""
    start = max(j for j in range(i) if trace[j] == vocabulary.BREAK)
    return vocabulary.WORDS[trace[start + 1]] == "Wait"


@pytest.mark.parametrize(
    "text",
    ["The answer is 5 .", "\n\n The answer is a0 . <eos>", "\n\n The answer is 5 <eos>", "5"],
)
def test_no_answer_is_read_where_there_is_none(text):
    assert task.answer_of(vocabulary.encode(text)) is None


def test_words_are_unique():
    assert len(set(vocabulary.WORDS)) == len(vocabulary.WORDS) <= vocabulary.SIZE
