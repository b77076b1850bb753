# SPDX-License-Identifier: Apache-2.0
"""YAML as configurations have it: no tags, no anchors, no dates, no key twice, nothing nested deep; decimal numbers.

YAML 1.1 takes `010` for eight, `1:30` for ninety and `1e-3` for text, and of a key that is there twice the last one. Who
reads one file in two places has to read the same in both, so there is one reader.
"""
from __future__ import annotations

import re
from typing import Any

import yaml

DEEPEST = 8


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in kinds if not tag.endswith(("timestamp", ":int", ":float"))]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    depth = 0

    def compose_node(self, parent, index):
        event = self.peek_event()
        self.depth += 1
        if self.depth > DEEPEST or getattr(event, "anchor", None) or getattr(event, "tag", None):
            what = "nested too deep" if self.depth > DEEPEST else "an anchor, an alias or a tag"
            raise yaml.composer.ComposerError(None, None, what, event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in keys[:i]:
                twice = f"{str(key.value)[:80]!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, twice, key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"), list("-+.0123456789"))


def plain_yaml(text: str | bytes) -> Any:
    """What the text says.

    Raises:
        ValueError: it is no such YAML; the message says where.

    Example:
        >>> from ms_dtensor.core.plain_yaml import plain_yaml
        >>> plain_yaml("lr: 1e-3")
        {'lr': 0.001}
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except (yaml.YAMLError, UnicodeError, OverflowError) as error:
        raise ValueError(str(error)) from None
