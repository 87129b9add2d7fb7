"""Find functions that take the whole configuration, a whole specification, or an object that holds one.

Types are read from the sources, without importing them: from annotations of parameters, results and fields,
and from what methods assign to attributes of `self`.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

__all__ = ["CONFIGURATION", "SPECS", "Function", "Program", "is_whole", "statements"]

CONFIGURATION = frozenset({"NeoXConfig", "Resolved"})
"""Names of the classes of the whole configuration."""

SPECS = frozenset({"ModelSpec", "RunSpec", "DataSpec", "UpdateSpec"})
"""Names of the classes of a whole specification."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Dotted names of classes.
Types = frozenset[str]
_NONE: Types = frozenset()
# What is annotated so is code or a constant, not an object with fields.
_NOT_HELD = ("Callable", "ClassVar", "Literal", "type")
# Calls whose result holds their arguments.
_HOLD_ARGUMENTS = ("partial", "replace", "list", "tuple", "dict")


def is_whole(name: str) -> bool:
    """Return whether a class, by its dotted name, is a whole configuration or specification."""
    return name.rpartition(".")[2] in CONFIGURATION | SPECS


class _Module:
    """The names of a module."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, Function] = {}
        self.imports: dict[str, str] = {}
        self.aliases: dict[str, ast.expr] = {}
        for node in _outside_functions(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript | ast.Name):
                self.aliases |= {each.id: node.value for each in node.targets if isinstance(each, ast.Name)}
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, Function):
                self.functions[node.name] = node
        for node in statements(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                self.imports |= {each.asname or each.name: home + each.name for each in node.names}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements, those inside of others too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(child)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.expr):
            yield from _outside_functions(child)


class Program:
    """The modules of the packages.

    Args:
        trees: syntax trees of the modules, by dotted name.
    """

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._modules = {name: _Module(name, tree) for name, tree in trees.items()}
        self._classes = {
            f"{module.name}.{name}": (module, node)
            for module in self._modules.values()
            for name, node in module.classes.items()
        }
        self._fields: dict[str, dict[str, Types]] = {}

    def takes(self, module: str, function: Function) -> str:
        """Return "configuration", "spec" or "holder", the first that a parameter is annotated with; or ""."""
        home = self._modules[module]
        annotations = [each.annotation for each in _parameters(function)]
        types = _union(self._annotated(home, each, ("Literal",)) for each in annotations)
        names = {each.rpartition(".")[2] for each in types}
        if names & CONFIGURATION:
            return "configuration"
        if names & SPECS:
            return "spec"
        return "holder" if types & self.holders else ""

    @cached_property
    def holders(self) -> Types:
        """Return the classes with a field that is a whole configuration or specification, or holds one."""
        held = {
            name: _union([*self._fields_of(name).values(), *self._bases(name)])
            for name in self._classes
            if not is_whole(name)
        }
        found: Types = _NONE
        while more := {
            name
            for name, types in held.items()
            if name not in found and (types & found or any(map(is_whole, types)))
        }:
            found |= more
        return found

    def _named(self, module: _Module, name: str, seen: Types = _NONE) -> Types:
        """Return the classes that a name in a module means."""
        place = f"{module.name}.{name}"
        if place in seen:
            return _NONE
        if name in module.classes:
            return frozenset({place})
        if name in module.aliases:
            return self._annotated(module, module.aliases[name], _NOT_HELD, seen | {place})
        home, _, original = module.imports.get(name, "").rpartition(".")
        if home in self._modules:
            return self._named(self._modules[home], original, seen | {place})
        return frozenset({name}) if is_whole(name) else _NONE

    def _annotated(
        self, module: _Module, node: ast.AST | None, leave_out: Iterable[str], seen: Types = _NONE
    ) -> Types:
        """Return the classes that an annotation names."""
        match node:
            case None:
                return _NONE
            case ast.Constant(value=str(text)):
                return self._annotated(module, ast.parse(text, mode="eval"), leave_out, seen)
            case ast.Name(id=name):
                return self._named(module, name, seen)
            case ast.Attribute(value=ast.Name(id=home), attr=name) if self._is_module(module, home):
                return self._named(self._modules[module.imports[home]], name, seen)
            case ast.Subscript(value=ast.Name(id=name)) if name in leave_out:
                return _NONE
        return _union(self._annotated(module, child, leave_out, seen) for child in ast.iter_child_nodes(node))

    def _is_module(self, module: _Module, name: str) -> bool:
        return module.imports.get(name) in self._modules

    def _bases(self, name: str) -> Iterator[Types]:
        module, node = self._classes[name]
        return (self._annotated(module, base, _NOT_HELD) for base in node.bases)

    def _fields_of(self, name: str) -> dict[str, Types]:
        """Return the types of a class's fields, those of its bases among them."""
        if name not in self._fields:
            self._fields[name] = (
                fields
            ) = {}  # A class that is asked for again meanwhile has those found so far.
            module, node = self._classes[name]
            for base in _union(self._bases(name)) & self._classes.keys():
                fields |= self._fields_of(base)
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    fields[each.target.id] = self._annotated(module, each.annotation, _NOT_HELD)
            for each in node.body:
                if isinstance(each, Function):
                    self._read_method(name, each)
        return self._fields[name]

    def _read_method(self, name: str, method: Function) -> None:
        """Add what a method assigns to attributes of its object to the fields of the class."""
        module, fields = self._classes[name][0], self._fields[name]
        known = {
            each.arg: self._annotated(module, each.annotation, _NOT_HELD) for each in _parameters(method)
        } | {"self": frozenset({name})}
        for target, annotation, value in _assignments(method):
            types = self._annotated(module, annotation, _NOT_HELD) or self._inferred(module, value, known)
            match target:
                case ast.Name(id=local):
                    known[local] = types
                case ast.Attribute(value=ast.Name(id="self"), attr=field):
                    fields[field] = fields.get(field, _NONE) | types

    def _inferred(self, module: _Module, node: ast.AST | None, known: Mapping[str, Types]) -> Types:
        """Return the classes of a value and of what it holds, as far as the source says."""
        match node:
            case ast.Name(id=name):
                return known.get(name, _NONE)
            case ast.Attribute(value=value, attr=name):
                return self._member(self._inferred(module, value, known), name)
            case ast.Call(func=ast.Name(id=name)) if name not in _HOLD_ARGUMENTS:
                return self._named(module, name) or self._returned(module, name)
            case ast.Call(func=ast.Attribute() as function):
                return self._inferred(module, function, known)
            case None | ast.Compare():
                return _NONE
        return _union(self._inferred(module, child, known) for child in ast.iter_child_nodes(node))

    def _returned(self, module: _Module, name: str) -> Types:
        home, _, original = module.imports.get(name, "").rpartition(".")
        owner = self._modules.get(home, module)
        function = owner.functions.get(original if home in self._modules else name)
        return _NONE if function is None else self._annotated(owner, function.returns, _NOT_HELD)

    def _member(self, types: Types, name: str) -> Types:
        """Return the classes of an attribute, or of what a method or property returns."""
        found = []
        for owner in types & self._classes.keys():
            module, node = self._classes[owner]
            found += [self._fields_of(owner).get(name, _NONE)]
            found += [
                self._annotated(module, each.returns, _NOT_HELD)
                for each in node.body
                if isinstance(each, Function) and each.name == name
            ]
        return _union(found)


def _union(types: Iterable[Types]) -> Types:
    return _NONE.union(*types)


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    variable = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *variable]


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Yield target, annotation and value of a function's assignments, in order; tuples are taken apart."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                yield target, annotation, value
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case _ if not isinstance(child, Function | ast.ClassDef | ast.expr):
                yield from _assignments(child)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, None, ast.expr]]:
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for each, its_value in zip(targets, values, strict=True):
                yield from _pairs(each, its_value)
        case ast.Tuple(elts=targets), _:
            for each in targets:
                yield each, None, value
        case _:
            yield target, None, value
