"""How does a class get its rewritten forward?"""

import ast
import copyreg
import functools
import linecache
import types
from multiprocessing.reduction import ForkingPickler

from torch import nn

from . import ops as fused_ops
from . import reference, registry
from .adapters import Adapter, adapted, helpers_of
from .first_call import Verdict, forward_of
from .inlining import with_helpers
from .patterns import Site
from .rewrite import PREFIX, Rewriter
from .runtime import NORM_OPS, FusedOps
from .source import FunctionSource, LeftEager, decorated_as, future_flags, running_source, shown_source, undecorated
from .tested_sources import TESTED_SOURCES

# Set on an instance while it is patched. A function that somebody put around its forward may outlive the patch.
MARK = "_adaptiveload_patched"
# What a test may consist of to be decided by settings alone.
_IN_TESTS = (
    *(ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Compare, ast.Eq, ast.NotEq, ast.In, ast.NotIn),
    *(ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)
# Arguments of FusedOps: the module of the ops, devices, what is passed to every op, what runs them.
BACKENDS = {
    "auto": (fused_ops, ("cpu", "cuda"), {}, registry),
    "cuda": (fused_ops, ("cuda",), {}, registry),
    "triton": (fused_ops, ("cuda",), {"backend": "triton"}, registry),
    "reference": (reference, ("cpu", "cuda"), {}, None),
}


class RewrittenForward:
    """The rewritten forward of one class for one choice of ops and backend, shared by its instances.

    It pickles as the class and the choice, and is written anew where it is loaded.

    Args:
        owner: the class whose own `forward` it is.
        norms: (path, type) of what the forward calls as `self.<path>` and an op may stand for.
        decided: (test, value) of each `if` that the settings of an instance decide.
        names: the ops to use.
        backend: "auto", "cuda", "triton" or "reference".
        verify: "auto" (compare unless tested), "always" or "never".
        adapter: what brings the forward into the form that is recognised, or None.

    Attributes:
        name: of the class, with its module.
        original: the class's own forward.
        function: the new forward; the original where nothing is fused.
        text: the source of a new forward, else "".
        digest: of what was rewritten, with its adapter; else "".
        sites: all that the source shows.
        reason: why the forward as a whole stays eager, or None.
        verdict: what is known of `function`.
        stand_in: what instances get as forward: the choice between both, by the verdict.
    """

    def __init__(
        self,
        owner: type,
        norms: tuple[tuple[str, type], ...],
        decided: tuple[tuple[str, bool], ...],
        names: frozenset[str],
        backend: str,
        verify: str,
        adapter: Adapter | None = None,
    ):
        self._made_from = (owner, norms, decided, names, backend, verify, adapter)
        self.name = f"{owner.__module__}.{owner.__qualname__}"
        self.original = vars(owner)["forward"]
        self.function = self.original
        self.text = ""
        self.digest = ""
        self.sites: list[Site] = []
        self.reason: str | None = None
        self.verdict = Verdict.TRUSTED
        self._helpers = helpers_of(owner, adapter)
        try:
            self._rewrite(verify)
        except LeftEager as error:
            self.reason = str(error)
            for site in self.sites:
                site.reason = self.reason
        self.stand_in = forward_of(self)

    def bind(self, module: nn.Module) -> types.MethodType:
        """The forward of one instance. A bound method: deep copies bind it to the copy, and torch.compile sees by its
        function that two instances run the same code (a `functools.partial` in a child compiles every block anew)."""
        return types.MethodType(self.stand_in, module)

    def stands_for(self, module: nn.Module) -> bool:
        """Whether the original would still run what was rewritten: the module is patched, and nobody has replaced its
        class's forward, or a helper that an adapter took out, since."""
        if MARK not in module.__dict__ or type(module).forward is not self.original:
            return False
        for name, helper, of_class in self._helpers:
            if of_class and (name in module.__dict__ or getattr(type(module), name) is not helper):
                return False
            if not of_class and undecorated(self.original).__globals__.get(name) is not helper:
                return False
        return True

    def __reduce__(self):
        return rewritten_forward, self._made_from

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def _rewrite(self, verify: str) -> None:
        # First what the file shows, proven or not: a class without sites needs no proof and no place in the report.
        adapter = self._made_from[-1]
        self.sites = self._rewriter(self._with_helpers(shown_source(self.original))).sites
        if not self.sites and adapter is None:
            return
        source = running_source(undecorated(self.original))
        source = self._with_helpers(source) if adapter is None else adapted(source, adapter)
        self.digest = source.digest
        rewriter = self._rewriter(source)
        self.sites = rewriter.sites
        is_rewritten = rewriter.run()
        self.sites = rewriter.sites
        if is_rewritten:
            self.function, self.text = self._compiled(source)
            tested = (
                verify == "auto" and TESTED_SOURCES.get(self.name.removeprefix("diffusers.models.")) == source.digest
            )
            if verify != "never":
                self.verdict = Verdict.TESTED if tested else Verdict.UNCHECKED

    def _with_helpers(self, source: FunctionSource) -> FunctionSource:
        norms = dict(self._made_from[1])
        source, helpers = with_helpers(source, undecorated(self.original).__globals__, norms.__contains__)
        read = tuple((name, function, False) for name, function in helpers)
        self._helpers = helpers_of(self._made_from[0], self._made_from[-1]) + read
        return source

    def _rewriter(self, source: FunctionSource) -> Rewriter:
        _, norms, decided, names, *_ = self._made_from
        norm_ops = {path: NORM_OPS.get(kind) for path, kind in norms}
        return Rewriter(source.tree, undecorated(self.original).__globals__, norm_ops, names, dict(decided))

    def _compiled(self, source: FunctionSource) -> tuple[types.FunctionType, str]:
        """Compile a rewritten tree among the globals, and with the defaults and decorators, of the original."""
        original, (_, _, _, names, backend, _, adapter) = undecorated(self.original), self._made_from
        functions = adapter.functions if adapter is not None else ()
        parameters = ", ".join([PREFIX, *(function.__name__ for function in functions)])
        factory = ast.parse(f"def make({parameters}):\n    return None").body[0]
        held, made = source.tree, source.tree.name
        if source.class_name is not None:
            # In a class of its name, so that private names are mangled as there; and that in a class whose names a
            # method does not see, so that the name of the class still means the class.
            holder = ast.parse(f"class {PREFIX}_scope:\n    class {source.class_name}: pass").body[0]
            holder.body[0].body, held, made = [held], holder, f"{PREFIX}_scope.{source.class_name}.{made}"
        factory.body = [held, ast.Return(ast.parse(made, mode="eval").body)]
        text = f"# {self.name}, rewritten by adaptiveload_hf\n{ast.unparse(ast.fix_missing_locations(factory))}\n"
        file_name = f"<adaptiveload_hf: {self.name} {id(self):x}>"
        linecache.cache[file_name] = (len(text), None, text.splitlines(keepends=True), file_name)
        code = compile(text, file_name, "exec", flags=future_flags(original), dont_inherit=True)
        namespace: dict = {}
        exec(code, original.__globals__, namespace)
        function = namespace["make"](FusedOps(*BACKENDS[backend], names), *functions)
        function.__defaults__, function.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
        function.__qualname__, function.__annotations__ = original.__qualname__, original.__annotations__
        return decorated_as(self.original, function), text


def rewritten_forward(owner: type, *others: object) -> RewrittenForward:
    """The `RewrittenForward` of these arguments, made once for each forward that the class has had."""
    return _made_once(vars(owner)["forward"], owner, *others)


@functools.cache
def _made_once(forward: object, *made_from) -> RewrittenForward:
    return RewrittenForward(*made_from)


def norms_of(module: nn.Module, owner: type) -> tuple[tuple[str, type], ...]:
    """(path, type) of the norms that the forward of `owner` calls as `self.<path>`, on this module.

    Paths as in the source. A child that is None counts: the branch that calls it never runs on this module.
    """
    found = []
    for path, stored in _paths_called(vars(owner)["forward"]):
        kind = type(functools.reduce(lambda parent, name: getattr(parent, name, ...), stored, module))
        if kind in NORM_OPS or kind is type(None):
            found.append((path, kind))
    return tuple(found)


def decided_of(module: nn.Module, owner: type) -> tuple[tuple[str, bool], ...]:
    """(test, value) of each `if` of the forward of `owner` that a word among this module's settings decides:
    `if self.norm_type == "ada_norm_zero"`. Should the setting change, what ran never before runs as written."""
    found = {}
    for test, names in _tests(vars(owner)["forward"]):
        settings = {name: vars(module).get(name) for name in names}
        if all(type(setting) is str for setting in settings.values()):
            code = compile(ast.fix_missing_locations(ast.Expression(test)), "<test>", "eval")
            found[ast.unparse(test)] = bool(eval(code, {}, {"self": types.SimpleNamespace(**settings)}))
    return tuple(found.items())


def forward_called_by(owner: type) -> type | None:
    """The class whose forward that of `owner` calls, by `super().forward(...)` or `Block.forward(self, ...)`."""
    base = next(cls for cls in owner.__mro__[1:] if "forward" in vars(cls))
    source = _shown(vars(owner)["forward"])
    nodes = [] if source is None else ast.walk(source.tree)
    holders = [ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "forward"]
    return base if any(holder.startswith("super(") or holder == base.__name__ for holder in holders) else None


@functools.cache
def _paths_called(forward: object) -> list[tuple[str, list[str]]]:
    """What a forward calls on self, as written and as the names under which it is stored."""
    source = _shown(forward)
    paths = [] if source is None else source.called_on_self()
    return [(path, list(map(source.stored_name, path.split(".")))) for path in paths]


@functools.cache
def _tests(forward: object) -> list[tuple[ast.expr, list[str]]]:
    """The tests of a forward that do no more than compare attributes of self with constants, and these attributes."""
    found, source = [], _shown(forward)
    branches = [] if source is None else [node for node in ast.walk(source.tree) if isinstance(node, ast.If)]
    for test in (branch.test for branch in branches):
        nodes = list(ast.walk(test))
        of_self = [n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        only_self = all(node.id == "self" for node in nodes if isinstance(node, ast.Name))
        if of_self and only_self and all(isinstance(node, _IN_TESTS) for node in nodes):
            found.append((test, of_self))
    return found


@functools.cache
def _shown(forward: object) -> FunctionSource | None:
    try:
        return shown_source(forward)
    except LeftEager:
        return None


def rewritten_behind(function: object) -> RewrittenForward | None:
    """The rewritten forward that a function is the stand-in of; not that of a function which only wraps one."""
    rewritten = getattr(function, "rewritten", None)
    # Not by identity: cloudpickle and dill copy the function itself.
    is_stand_in = rewritten is not None and getattr(function, "__code__", None) == rewritten.stand_in.__code__
    return rewritten if is_stand_in else None


def _reduce_method(method: types.MethodType) -> tuple:
    rewritten = rewritten_behind(method.__func__)
    return method.__reduce__() if rewritten is None else (rewritten.bind, (method.__self__,))


# A bound method pickles as its function's name, which would lead to the class's own forward. Others stay as they were.
copyreg.pickle(types.MethodType, _reduce_method)
ForkingPickler.register(types.MethodType, _reduce_method)  # multiprocessing's, which has its own way
