"""Reconciles one job: observe, plan, apply.

Called by `controller`.
"""

from surefoot_operator.reconcile.reconciler import Reconciler as Reconciler
