"""ANTLR's predictions, held against ANTLR's own: the same trees, from the same tables."""

from typing import Any

import pytest
from antlr4.atn.PredictionMode import PredictionMode
from antlr4.atn.Transition import Transition
from antlr4.dfa.DFA import DFA
from antlr4.PredictionContext import PredictionContextCache
from latex2sympy2_extended.gen.antlr4_13_2.PSParser import PSParser
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

from exgrpo_cli.verifiers import prediction
from exgrpo_cli.verifiers.prediction import Prediction

TEXTS = r"""
5
-7
x
2x
x^2-3x+2
\frac{3}{4}
-\frac{\sqrt{5}-1}{2}
\frac{a M^{1 / 3}}{G M^{2 / 3}+b}
k(4 k^{2}+k-1) / 2
s^{2}+b s+1
\omega^{2} e^{-\zeta t} \cos (\omega \sqrt{1-\zeta^{2}} t)
f(x)=a(x+1)(x-2)
y=\frac{1}{2} x+3
x^{\prime}+\frac{r}{V} x-r c=0
(3, 4)
(-\infty, 2)\cup[3, \infty)
\{1, 2, 3\}
x \in [0, 1]
x \neq 3
1 < x \le 5
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\sin^{2} x+\cos^2(x)
\log_2 3
\ln(2)
\binom{10}{3}
\sum_{k=1}^{n} k^2
\int_0^{1} x\,dx
\lim_{x \to 0} x
\lfloor x\rfloor
|x-1|
n!
3+4i
50\%
10^{-5}
\arcsin{1.3 \sin{\theta}}
\frac{d v}{d t}+b v
a b c(d+e)f
((((1))))
x_1 x_2
\sqrt[3]{2}
1 +
\frac{1}{
^2
(1
""".strip().splitlines()


class _Parser(_Latex2Sympy):  # type: ignore[misc]
    def __init__(self, own: bool, mode: Any) -> None:
        super().__init__(is_real=True)
        self.own, self.mode = own, mode

    def tree(self, text: str) -> str:
        parser = super().create_parser(text)
        if self.own:
            parser._interp = Prediction(parser)
        parser._interp.predictionMode = self.mode
        try:
            return str(parser.math().toStringTree(recog=parser))
        except Exception as error:
            return type(error).__name__


def read(own: bool, mode: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """The trees of all texts, read twice, and the tables that this has made."""
    tables = [DFA(state, number) for number, state in enumerate(PSParser.atn.decisionToState)]
    monkeypatch.setattr(PSParser, "decisionsToDFA", tables)
    monkeypatch.setattr(PSParser, "sharedContextCache", PredictionContextCache())
    parser = _Parser(own, mode)
    trees = [parser.tree(text) for text in [*TEXTS, *TEXTS]]
    states = [
        sorted((s.stateNumber, str(s.configs), s.prediction) for s in table.states.values())
        for table in tables
    ]
    return trees, states


@pytest.mark.parametrize("mode", [PredictionMode.SLL, PredictionMode.LL], ids=["SLL", "LL"])
def test_the_same_trees_from_the_same_tables(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_memory", prediction._Memory())
    expected = read(False, mode, monkeypatch)
    assert read(True, mode, monkeypatch) == expected
    assert sum("Exception" in tree for tree in expected[0]) in range(2, 40)  # of 2 * 46


def test_full_context_predictions_are_remembered_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "_memory", prediction._Memory())
    parser, text = _Parser(True, PredictionMode.LL), r"\frac{a M^{1 / 3}}{G M^{2 / 3}+b}"
    first = parser.tree(text)
    size = prediction._memory.size
    assert size > 0
    assert parser.tree(text) == first
    assert prediction._memory.size == size
    monkeypatch.setattr(prediction, "_REMEMBERED", size - 1)
    parser.tree("x")
    assert prediction._memory.size < size
    assert parser.tree(text) == first


def test_the_grammar_has_no_predicates_but_precedence() -> None:
    kinds = {t.serializationType for state in PSParser.atn.states for t in state.transitions}
    assert Transition.PRECEDENCE in kinds
    assert Transition.PREDICATE not in kinds
