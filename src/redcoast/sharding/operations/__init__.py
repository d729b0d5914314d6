"""What operations do with the dimensions of their operands: one rule for each primitive.

`rule_of` reads the rule of an equation from a table. The vocabulary is from Shardy, the partitioner
of XLA: a dimension is a list of factors, and each factor is carried from operands to results,
reduced, moved, or needed as a whole. `_rule.py` has this vocabulary, `_rule_table.py` the table,
the files that end in `_rules.py` the rules by kind, and `_scan_over_rows.py` finds scans whose
iterations are independent. Comments such as `[i k], [k j] -> [i j]` write the factors of an
example. `tests/sharding/test_operations.py` compares the table with the rules of the installed XLA.
"""

from ._elementwise_rules import stops_gradient as stops_gradient
from ._reduction_rules import makes_kernel as makes_kernel
from ._rule import TURNED as TURNED
from ._rule import Atom as Atom
from ._rule import Dimension as Dimension
from ._rule import Dimensions as Dimensions
from ._rule import Factor as Factor
from ._rule import Rule as Rule
from ._rule import all_factors as all_factors
from ._rule import atom_bytes as atom_bytes
from ._rule import fixed_operands as fixed_operands
from ._rule import is_linear as is_linear
from ._rule import shape_of as shape_of
from ._rule_table import is_cumulative as is_cumulative
from ._rule_table import opaque_rule as opaque_rule
from ._rule_table import rule_of as rule_of
