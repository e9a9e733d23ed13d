"""Rules of legality, and the first one that does not hold, as text.

Configurations list the rules of their fields, of a tile and of a problem. Rules say what a kernel
can do. The ``choose`` modules say what is faster.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cute_kernels.capability import Support


class Rule(NamedTuple):
    """A rule about one argument.

    Attributes:
        holds: True if the argument keeps the rule.
        argument: Name of the argument.
        value: Value of the argument.
        requirement: The rule, a clause without a period.
    """

    holds: bool
    argument: str
    value: object
    requirement: str

    @property
    def reason(self) -> str:
        """The rule, the argument and its value, for an error message."""
        return f"{self.requirement}, got {self.argument}={self.value!r}"


def check_rules(rules: Iterable[Rule]) -> Support:
    """Return the first rule that does not hold as a ``Support``, or support if all of them hold.

    Later rules may depend on earlier ones: a generator of rules is not advanced past the first
    one that does not hold.
    """
    for rule in rules:
        if not rule.holds:
            return Support(False, rule.reason)
    return Support(True)
