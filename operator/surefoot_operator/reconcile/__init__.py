"""Reconciles one job: observe, plan, apply.

Called by `controller`.
"""

from surefoot_operator.reconcile.loop import Reconciler as Reconciler
