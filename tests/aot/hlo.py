"""As much of XLA's textual HLO as the checks need."""

import dataclasses
import math
import re

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)?(.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLERS = ("while", "conditional", "call", "async-start")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        sizes: elements of each array that it results in.
        operands: names, of the same computation.
    """

    name: str
    opcode: str
    type: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    attributes: str

    def __str__(self) -> str:
        return f"{self.name} = {self.type} {self.opcode}"

    def called(self) -> list[str]:
        """Names of the computations that it calls."""
        lists = re.findall(r"(?:calls|body|condition|to_apply)=%([\w.-]+)", self.attributes)
        for branches in re.findall(r"(?:branch|called)_computations=\{([^}]*)\}", self.attributes):
            lists += re.findall(r"%([\w.-]+)", branches)
        return lists


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, each a mapping from names to instructions."""

    entry: str
    computations: dict[str, dict[str, Instruction]]

    def executed(self) -> list[Instruction]:
        """Instructions with results in memory: all but those inside fusions and reductions."""
        return [
            instruction
            for name in self._reachable([self.entry], _CALLERS)
            for instruction in self.computations[name].values()
        ]

    def waits(self) -> list[Instruction]:
        """Loops and branches whose turns only the device knows: they hold the host at each."""
        return [
            instruction
            for instruction in self.executed()
            if instruction.opcode == "conditional"
            or (instruction.opcode == "while" and "known_trip_count" not in instruction.attributes)
        ]

    def looped(self) -> list[tuple[Instruction, list[Instruction]]]:
        """Instructions of all loops' bodies, fused ones too, each with its operands."""
        bodies = [
            name
            for instruction in self.executed()
            if instruction.opcode == "while"
            for name in instruction.called()
        ]
        return [
            (instruction, [computation[name] for name in instruction.operands])
            for computation in map(self.computations.get, self._reachable(bodies, None))
            for instruction in computation.values()
        ]

    def _reachable(self, names: list[str], callers: tuple[str, ...] | None) -> list[str]:
        seen = dict.fromkeys(names)
        waiting = list(names)
        while waiting:
            for instruction in self.computations[waiting.pop()].values():
                if callers is None or instruction.opcode in callers:
                    new = [name for name in instruction.called() if name not in seen]
                    seen |= dict.fromkeys(new)
                    waiting += new
        return list(seen)


def parse(text: str) -> Module:
    """Read a module from ``Compiled.as_text()``."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computations[header[2]] = current = {}
            entry = header[2] if header[1] else entry
        elif computations and (match := _INSTRUCTION.match(line)):
            current[match[1]] = _instruction(*match.groups())
    return Module(entry, computations)


def _instruction(name: str, kind: str, opcode: str, operands: str, attributes: str) -> Instruction:
    sizes = tuple(
        math.prod(int(extent) for extent in shape.split(",") if extent)
        for _, shape in _ARRAY.findall(kind)
    )
    names = tuple(re.findall(r"%([\w.-]+)", operands))
    return Instruction(name, opcode, kind, sizes, names, attributes)
