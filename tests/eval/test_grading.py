"""Answers are read out of their boxes and compared by what they mean."""

import itertools
import pathlib

import pytest

from kvjax.eval.grading import boxed, equivalent


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {5} \fboxed{6}", "6"),
        (r"\boxed{\text{a } b}", r"\text{a } b"),
        (r"\boxed{a \\ {b}}", r"a \\ {b}"),
        (r"\boxed{\boxed{7}}", "7"),
        ("72", None),
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_complete_box_counts(text, found):
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1/2", "0.5"),
        (r"\frac12", r"\frac{1}{2}"),
        ("1000", "1,000"),
        ("72", "072"),
        ("18", r"\$18"),
        ("18", "18.0"),
        ("90", r"90^\circ"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("p - q", "-q+p"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\text{Evelyn}", "Evelyn"),
        ("10^{6}", "1000000"),
        ("5", "x=5"),
    ],
)
def test_what_means_the_same_is_right(one, other):
    assert equivalent(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3", "4"),
        ("3", "-3"),
        ("(1,2)", "(2,1)"),
        ("[1,2)", "(1,2]"),
        ("1/3", "0.333"),
        ("2,3", "23"),
        ("even", "odd"),
        ("x^2", "x^3"),
        ("72", ""),
        ("72", r"\frac{"),
        ("72", "7 2"),
        ("72", "the answer"),
    ],
)
def test_what_means_something_else_is_wrong(one, other):
    assert not equivalent(one, other)


def test_every_answer_of_math_500_is_its_own():
    path = pathlib.Path(__file__).parents[3] / "shared" / "data" / "math500" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}: the 500 problems of MATH-500 as JSON lines")
    from kvjax.eval.problems import file_group

    gold = [problem.gold for problem in file_group("math500", path, 60, 0, 1).problems]
    assert all(equivalent(one, f" {one}") for one in gold)
    assert sum(equivalent(a, b) for a, b in itertools.pairwise(gold) if a != b) <= 1
