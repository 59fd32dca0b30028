"""ANTLR's adaptive prediction, faster: most of the time that reading LaTeX takes.

The parses are those of ``antlr4.atn.ParserATNSimulator`` (the ALL(*) algorithm: Parr, Harwell,
Fisher, *Adaptive LL(*) Parsing*, OOPSLA 2014; runtime 4.13.2, BSD licence), which
``tests/verifiers/test_prediction.py`` holds against it. Two things differ: full-context
predictions are remembered as well (ANTLR keeps tables for the others only), and a closure makes an
object for a configuration only where a set keeps it.
"""

from __future__ import annotations

from typing import Any

from antlr4.atn.ATNConfig import ATNConfig
from antlr4.atn.ATNConfigSet import ATNConfigSet
from antlr4.atn.ATNState import ATNState
from antlr4.atn.ParserATNSimulator import ParserATNSimulator
from antlr4.atn.SemanticContext import SemanticContext, andContext
from antlr4.atn.Transition import Transition
from antlr4.PredictionContext import PredictionContext, SingletonPredictionContext, merge
from antlr4.Token import Token

_REMEMBERED = 500_000  # configurations of full-context predictions; some hundred bytes each
_EMPTY, _EMPTY_RETURN = PredictionContext.EMPTY, PredictionContext.EMPTY_RETURN_STATE
_NONE = SemanticContext.NONE


class _Memory:
    """Full-context predictions: their start sets, and where each token leads from a set."""

    def __init__(self) -> None:
        self.starts: dict[tuple[int, ...], ATNConfigSet] = {}
        self.reached: dict[int, dict[int, ATNConfigSet | None]] = {}  # by the set's id
        self.size = 0

    def keep(self, configs: ATNConfigSet) -> None:
        self.reached[id(configs)] = {}
        self.size += len(configs)


_memory = _Memory()


class Prediction(ParserATNSimulator):  # type: ignore[misc]
    """The simulator of one parser; as ANTLR's own, it shares its tables with all others."""

    def __init__(self, parser: Any) -> None:
        super().__init__(parser, parser.atn, parser.decisionsToDFA, parser.sharedContextCache)

    def execATN(self, *arguments: Any) -> Any:  # noqa: N802
        global _memory
        if _memory.size > _REMEMBERED:  # not in the middle of a prediction
            _memory = _Memory()
        return super().execATN(*arguments)

    def computeStartState(self, p: Any, ctx: Any, fullCtx: bool) -> Any:  # noqa: N802, N803
        if not fullCtx:
            return super().computeStartState(p, ctx, False)
        # all that it depends on: the grammar's predicates are about precedence alone
        key = [p.stateNumber, self.parser._precedenceStack[-1]]
        while ctx is not None and ctx.invokingState >= 0:
            key.append(ctx.invokingState)
            ctx = ctx.parentCtx
        start = _memory.starts.get(tuple(key))
        if start is None:
            start = super().computeStartState(p, self._outerContext, True)
            _memory.keep(start)
            _memory.starts[tuple(key)] = start
        return start

    def computeReachSet(self, closure: Any, t: int, fullCtx: bool) -> Any:  # noqa: N802, N803
        if not fullCtx:
            return super().computeReachSet(closure, t, False)
        reached = _memory.reached[id(closure)]
        if t not in reached:
            found = super().computeReachSet(closure, t, True)
            if found is not None:
                _memory.keep(found)
            reached[t] = found
        return reached[t]

    def closure(
        self,
        config: Any,
        configs: Any,
        closureBusy: set[Any],  # noqa: N803
        collectPredicates: bool,  # noqa: N803
        fullCtx: bool,  # noqa: N803
        treatEofAsEpsilon: bool,  # noqa: N803
    ) -> None:
        """Add to ``configs`` what ``config`` leads to without a token."""
        states, cache, lookup, dfa = (
            self.atn.states,
            self.mergeCache,
            configs.configLookup,
            self._dfa,
        )
        outermost = dfa.atnStartState.ruleIndex if dfa is not None and dfa.precedenceDfa else None

        def put(
            state: Any, alt: int, context: Any, semantic: Any, outer: int, suppressed: bool
        ) -> None:  # ATNConfigSet.add
            if semantic is not _NONE:
                configs.hasSemanticContext = True
            if outer > 0:
                configs.dipsIntoOuterContext = True
            number = state.stateNumber
            same = lookup.setdefault(hash((number, alt, hash(semantic))), [])
            for old in same:
                if (
                    old.alt == alt
                    and old.state.stateNumber == number
                    and old.semanticContext == semantic
                ):
                    break
            else:
                new = ATNConfig(state, alt, context, semantic)
                new.reachesIntoOuterContext = outer
                new.precedenceFilterSuppressed = suppressed
                same.append(new)
                configs.configs.append(new)
                configs.cachedHashCode = -1
                return
            if old.context is not context:
                old.context = merge(old.context, context, not fullCtx, cache)
            old.reachesIntoOuterContext = max(old.reachesIntoOuterContext, outer)
            old.precedenceFilterSuppressed = old.precedenceFilterSuppressed or suppressed

        def visit(
            state: Any,
            alt: int,
            context: Any,
            semantic: Any,
            outer: int,
            suppressed: bool,
            collect: bool,
            depth: int,
        ) -> None:  # closureCheckingStopState
            if state.stateType == ATNState.RULE_STOP:
                if context is not _EMPTY:
                    for index in range(len(context)):
                        back = context.getReturnState(index)
                        if back != _EMPTY_RETURN:
                            parent = context.getParent(index)
                            visit(
                                states[back],
                                alt,
                                parent,
                                semantic,
                                outer,
                                False,
                                collect,
                                depth - 1,
                            )
                        elif fullCtx:
                            put(state, alt, _EMPTY, semantic, outer, suppressed)
                        else:
                            walk(state, alt, context, semantic, outer, suppressed, collect, depth)
                    return
                if fullCtx:
                    put(state, alt, context, semantic, outer, suppressed)
                    return
            walk(state, alt, context, semantic, outer, suppressed, collect, depth)

        def walk(
            state: Any,
            alt: int,
            context: Any,
            semantic: Any,
            outer: int,
            suppressed: bool,
            collect: bool,
            depth: int,
        ) -> None:  # closure_
            if not state.epsilonOnlyTransitions:
                put(state, alt, context, semantic, outer, suppressed)
                if not treatEofAsEpsilon:
                    return
            stop = state.stateType == ATNState.RULE_STOP
            skip = (
                state.stateType == ATNState.STAR_LOOP_ENTRY
                and state.isPrecedenceDecision
                and self.canDropLoopEntryEdgeInLeftRecursiveRule(ATNConfig(state, alt, context))
            )
            for t in state.transitions:
                if skip:
                    skip = False
                    continue
                kind = t.serializationType
                collecting, below, meaning, dipped, held = (
                    collect,
                    context,
                    semantic,
                    outer,
                    suppressed,
                )
                if kind == Transition.EPSILON:
                    pass
                elif kind == Transition.RULE:
                    below = SingletonPredictionContext.create(context, t.followState.stateNumber)
                elif kind == Transition.ACTION:
                    collecting = False
                elif kind == Transition.PRECEDENCE:
                    if collect and depth == 0:
                        if not fullCtx:
                            meaning = andContext(semantic, t.getPredicate())
                        elif not t.getPredicate().eval(self.parser, self._outerContext):
                            continue
                elif not (treatEofAsEpsilon and t.matches(Token.EOF, 0, 1)):
                    continue
                level = depth
                if stop:
                    held = suppressed or t.outermostPrecedenceReturn == outermost
                    dipped += 1
                if stop or not t.isEpsilon:
                    key = (t.target.stateNumber, alt, below, meaning, held)
                    if key in closureBusy:
                        continue
                    closureBusy.add(key)
                if stop:
                    configs.dipsIntoOuterContext = True
                    level -= 1
                elif kind == Transition.RULE and level >= 0:
                    level += 1
                visit(t.target, alt, below, meaning, dipped, held, collecting, level)

        visit(
            config.state,
            config.alt,
            config.context,
            config.semanticContext,
            config.reachesIntoOuterContext,
            config.precedenceFilterSuppressed,
            collectPredicates,
            0,
        )
