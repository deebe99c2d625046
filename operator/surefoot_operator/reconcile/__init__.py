"""Observe, plan, apply: the loop that carries one job's decisions out. Called by `controller`."""

from surefoot_operator.reconcile.loop import Reconciler as Reconciler
