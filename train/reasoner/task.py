"""Problems of the reasoner, with the traces that solve them: see docs/reasoner.md for the design.

A problem defines named quantities modulo 100, in shuffled order and with distractors, corrects some
of the definitions in notes, and asks for one quantity. Its trace derives that depth first, in
paragraphs of known kinds. All of it follows from the seed; the trace follows from the prompt.
"""

import dataclasses
import random
from collections.abc import Iterator

from kvjax.train.reasoner.vocabulary import BOS, EOS, MODULUS, NAMES, PARAGRAPH, encode

PROMPT, REASONING, EXECUTION, TRANSITION, ANSWER = range(5)
"""Kinds of paragraphs; the break before a paragraph is part of it."""

WIDTHS = {200: 320, 500: 704, 1000: 1280, 2000: 2560, 4000: 5120}
"""Levels, by about how many tokens their traces have, and the tokens that hold any such problem."""
TOLERANCE = 0.1
"""A trace's length is off its level by this share at most."""
FAR, DISTANCE = 1000, 0.6
"""From this level on, some value that is needed was last stated this share of the trace before."""
_TOKENS = 66
"""Of a trace, for each quantity that is needed: about."""
_NOTED, _BRANCHING, _REUSING = 0.2, 0.27, 0.55
_GOALS = 3
"""How many pending goals a plan restates."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """``left op right``; a constant is on the right, alone where there is no operator."""

    left: str = ""
    op: str = ""
    right: str | int = 0

    @property
    def operands(self) -> tuple[str, ...]:
        """The quantities that it reads, in order."""
        return tuple(name for name in (self.left, self.right) if name and isinstance(name, str))

    def __str__(self) -> str:
        return f"{self.left} {self.op} {self.right}" if self.op else str(self.right)

    def filled(self, values: dict[str, int]) -> str:
        """The same, with the values of the quantities."""
        return str(Formula(str(values[self.left]), self.op, values.get(self.right, self.right)))

    def value(self, values: dict[str, int]) -> int:
        right = values.get(self.right, self.right)
        if not self.op:
            return right
        left = values[self.left]
        result = {"+": left + right, "-": left - right, "*": left * right}[self.op]
        return result % MODULUS


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        tokens: prompt and trace, `BOS` to `EOS`.
        kinds: the kind of each token's paragraph.
        prompt: how many of the tokens are the prompt.
        answer: what is asked for, 0 to 99.
        reads: for each value that the trace looks up, by how many tokens it was last stated before.
    """

    tokens: tuple[int, ...]
    kinds: tuple[int, ...]
    prompt: int
    answer: int
    reads: tuple[int, ...]


def problem(level: int, index: int, *, split: str = "test", seed: int = 0) -> Problem:
    """Problem number ``index`` of a level; the same one whenever it is asked for.

    Args:
        level: a key of `WIDTHS`.
        index: any number.
        split: what it is for; problems of one split are independent of those of another.
        seed: of the split.
    """
    rng = random.Random(f"{seed}/{split}/{level}/{index}")
    needed = max(round(level / _TOKENS * rng.uniform(0.9, 1.1)), 2)
    while True:
        found = _solve(_Draft(rng, needed))
        length = len(found.tokens) - found.prompt
        if abs(length - level) > TOLERANCE * level or len(found.tokens) > WIDTHS[level]:
            needed = max(needed + rng.randint(0, 1) * (1 if length < level else -1), 2)
        elif level < FAR or max(found.reads) > DISTANCE * length:
            return found


def answer_of(tokens) -> int | None:
    """The number that an answer ends with, None if it ends otherwise."""
    before, given = encode("\n\n The answer is"), list(tokens)
    tail = given[-7:]
    if len(tail) < 7 or tail[:4] != before or tail[5:] != [*encode("."), EOS]:
        return None
    value = tail[4] - encode("0")[0]
    return value if 0 <= value < MODULUS else None


class _Draft:
    """Quantities in the order in which a depth-first derivation solves them.

    Attributes:
        formulas: as the prompt gives them; notes: what some of them should be.
        target: the quantity that is asked for.
        unused: defined, but not needed.
    """

    def __init__(self, rng: random.Random, needed: int):
        self.rng = rng
        self.formulas: dict[str, Formula] = {}
        self.notes: dict[str, Formula] = {}
        distractors = 1 + round(needed * rng.uniform(0.1, 0.4))
        self._names = iter(rng.sample(NAMES, needed + distractors))
        self._solved: list[str] = []  # the one that was mentioned longest ago comes first
        self.target = self._grow(needed, root=True)
        self.unused = [self._distract() for _ in range(distractors)]

    def _grow(self, size: int, *, root: bool = False) -> str:
        """A quantity whose derivation solves ``size`` new ones, itself included."""
        rng, name = self.rng, next(self._names)
        draw = rng.random()
        if size == 1 and len(self._solved) > 1 and draw < 0.6:
            early = self._reused()
            self._binary(name, early, self._reused(early))
        elif size == 1:
            self.formulas[name] = Formula(right=rng.randrange(MODULUS))
        elif size >= 3 and (root or draw < _BRANCHING):
            # The first operand has to be kept in mind while the second is worked out.
            low, high = (0.2, 0.33) if root else (0.0, 1.0)
            first = min(max(round(rng.uniform(low, high) * (size - 1)), 1), size - 2)
            left = self._grow(first)
            if root and size >= 10:  # it is out of sight until the end
                self._solved.remove(left)
            self._binary(name, left, self._grow(size - 1 - first))
        elif self._solved and draw < _BRANCHING + _REUSING:
            early = self._reused() if rng.random() < 0.8 else None
            operand = self._grow(size - 1)
            if early is None:
                self._binary(name, operand, self._reused(operand))
            else:
                self._binary(name, early, operand)
        else:
            self._unary(name, self._grow(size - 1))
        self._mention(*self.formulas[name].operands, name)
        return name

    def _reused(self, but: str | None = None) -> str:
        """A quantity that is solved by now: the one longest out of sight, or any."""
        choice = [name for name in self._solved if name != but] or [but]
        found = choice[0] if self.rng.random() < 0.7 else self.rng.choice(choice)
        self._mention(found)
        return found

    def _mention(self, *names: str) -> None:
        self._solved = [name for name in self._solved if name not in names] + list(names)

    def _unary(self, name: str, operand: str) -> None:
        self.formulas[name] = self._changed(Formula(operand))
        self._note(name)

    def _binary(self, name: str, left: str, right: str) -> None:
        self.formulas[name] = Formula(left, self.rng.choice("+-"), right)
        self._note(name)

    def _note(self, name: str) -> None:
        if self.rng.random() < _NOTED:
            self.notes[name] = self._changed(self.formulas[name])

    def _changed(self, old: Formula) -> Formula:
        """Another formula of the same quantities. One operand's error always shows."""
        if len(old.operands) == 2:
            return dataclasses.replace(old, op="-" if old.op == "+" else "+")
        while True:
            op = self.rng.choice("++--*")
            right = self.rng.choice((3, 7, 9)) if op == "*" else self.rng.randint(1, 9)
            if (op, right) != (old.op, old.right):
                return Formula(old.left, op, right)

    def _distract(self) -> str:
        name, rng = next(self._names), self.rng
        others = list(self.formulas)
        draw = rng.random()
        if draw < 0.3:
            self.formulas[name] = Formula(right=rng.randrange(MODULUS))
        elif draw < 0.6:
            self._unary(name, rng.choice(others))
        else:
            self._binary(name, *rng.sample(others, 2))
        return name


def _solve(draft: _Draft) -> Problem:
    """The prompt and the trace of a draft."""
    trace = _Trace(draft)
    kinds, texts = zip(*trace.paragraphs(), strict=True)
    parts = [[BOS, *encode(_prompt(draft))], *map(encode, texts)]
    parts[-1].append(EOS)
    return Problem(
        tokens=tuple(token for part in parts for token in part),
        kinds=tuple(
            kind
            for kind, part in zip((PROMPT, *kinds), parts, strict=True)
            for _ in range(len(part))
        ),
        prompt=len(parts[0]),
        answer=trace.values[draft.target],
        reads=tuple(trace.reads),
    )


def _prompt(draft: _Draft) -> str:
    rng = draft.rng
    names, noted = list(draft.formulas), list(draft.notes)
    rng.shuffle(names)
    rng.shuffle(noted)
    given = " ".join(f"{name} = {draft.formulas[name]} ." for name in names)
    notes = " ".join(f"{name} should be {draft.notes[name]} ." for name in noted)
    question = f"Question : find {draft.target} for the answer ."
    return f"Given : {given} Notes : {notes or 'none .'} {question}"


class _Trace:
    """Writes the derivation, a paragraph at a time.

    Attributes:
        values: of the quantities solved so far.
        reads: see `Problem`.
    """

    def __init__(self, draft: _Draft):
        self.values: dict[str, int] = {}
        self.reads: list[int] = []
        self._draft = draft
        self._asker: dict[str, str] = {draft.target: "the answer"}
        self._stated: dict[str, int] = {}
        self._words: list[str] = []
        self._length = 0

    def paragraphs(self) -> Iterator[tuple[int, str]]:
        """Kind and text of each paragraph."""
        goal: str | None = self._draft.target
        since: list[str] = []  # solved since the last plan
        while goal is not None:
            ready = self._plan(goal, since)
            yield self._end(REASONING)
            since = []
            goal = None
            while ready is not None and goal is None:
                noted = ready in self._draft.notes
                self._execute(ready, corrected=False)
                if noted:
                    yield self._end(EXECUTION)
                    self._correct(ready)
                    yield self._end(TRANSITION)
                elif self._draft.formulas[ready].op and self.values[ready] % 10 == 0:
                    yield self._end(EXECUTION)
                    self._check(ready)
                    yield self._end(TRANSITION)
                since.append(ready)
                ready, goal = self._back(self._asker[ready])
            yield self._end(EXECUTION)
        self._write(f"The answer is {self.values[self._draft.target]} .")
        yield self._end(ANSWER)

    def _plan(self, goal: str, since: list[str]) -> str:
        """Say what is known and needed, and descend to a quantity that can be worked out."""
        if since:
            self._write("So far")
            for name in since:
                self._write(", ")
                self._state(name)
            self._write(".")
        goals, name = [], goal
        while len(goals) < _GOALS and name in self._asker:
            goals.append(f"{name} for {self._asker[name]}")
            name = self._asker[name]
        self._write(f"We need {' , '.join(goals)} .")
        while True:
            self._write(f"To get {goal} , use {goal} = {self._draft.formulas[goal]} .")
            missing = self._look_up(goal)
            if missing is None:
                return goal
            goal = missing

    def _look_up(self, name: str) -> str | None:
        """State the operands of a quantity, up to the first that is missing."""
        for operand in self._draft.formulas[name].operands:
            self._write("Recall")
            if operand not in self.values:
                self._asker[operand] = name
                self._write(f"{operand} ? Find {operand} for {name} .")
                return operand
            self._state(operand, read=True)
            self._write(".")
        return None

    def _execute(self, name: str, *, corrected: bool) -> None:
        """Work out a quantity; by its first formula alone where a note corrects it."""
        noted = name in self._draft.notes
        formula = (self._draft.notes if corrected else self._draft.formulas)[name]
        value = formula.value(self.values)
        if not formula.op:
            self._write(f"{name} = {value}")
        else:
            self._write(f"{name} = {formula} = {formula.filled(self.values)} = {value}")
        if noted and not corrected:
            self._write(f". So {name} ?")
            return
        self.values[name] = value
        self._write(". Now" if corrected else ". So")
        self._state(name)
        self._write(".")

    def _correct(self, name: str) -> None:
        self._write(f"Wait , the Notes say {name} should be {self._draft.notes[name]} .")
        self._write("The last step is wrong . Let me redo this .")
        for operand in self._draft.formulas[name].operands:
            self._write("Recall")
            self._state(operand)
            self._write(".")
        self._execute(name, corrected=True)

    def _check(self, name: str) -> None:
        formula, value = self._draft.formulas[name], self.values[name]
        self._write(f"Wait , {value} looks odd . Check again : {name} = {formula}")
        self._write(f"= {formula.filled(self.values)} = {value} . Yes ,")
        self._state(name)
        self._write(".")

    def _back(self, name: str) -> tuple[str | None, str | None]:
        """Return to the goal that asked: it can be worked out now, or what is missing is the goal.

        Returns:
            The one or the other; neither at the end.
        """
        if name not in self._asker:
            self._write(f"Back to {name} .")
            return None, None
        self._write(f"Back to {name} , use {name} = {self._draft.formulas[name]} .")
        missing = self._look_up(name)
        return (name, None) if missing is None else (None, missing)

    def _state(self, name: str, *, read: bool = False) -> None:
        at = self._length
        if read:
            self.reads.append(at - self._stated[name])
        self._stated[name] = at
        self._write(f"{name} is {self.values[name]}")

    def _write(self, text: str) -> None:
        words = text.split()
        self._words += words
        self._length += len(words)

    def _end(self, kind: int) -> tuple[int, str]:
        text = " ".join([PARAGRAPH, *self._words])
        self._words = []
        self._length += 1
        return kind, text
