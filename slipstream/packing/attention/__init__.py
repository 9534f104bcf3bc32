"""Attention over packed rows: each token attends to its own path in the row's tree."""

from slipstream.packing.attention.interface import TREE, tree_forward, use_tree_attention
from slipstream.packing.attention.layout import TreeLayout
from slipstream.packing.attention.support import check_model

__all__ = ["TREE", "TreeLayout", "check_model", "tree_forward", "use_tree_attention"]
