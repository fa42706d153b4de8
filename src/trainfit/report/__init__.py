"""What people see: Rich renderables of profiles, plans and comparisons. Nothing here prints."""

from trainfit.report.compare import Comparison, compare, comparison_view
from trainfit.report.device_view import devices_table
from trainfit.report.html import comparison_page, plan_page, profile_page
from trainfit.report.pieces import facts, memory_bars
from trainfit.report.plan_view import alternatives_table, plan_view
from trainfit.report.policy_view import policies_table
from trainfit.report.profile_view import collectives_table, profile_view, ranks_table
from trainfit.report.verify_view import verify_view

__all__ = [
    "Comparison",
    "alternatives_table",
    "collectives_table",
    "compare",
    "comparison_page",
    "comparison_view",
    "devices_table",
    "facts",
    "memory_bars",
    "plan_page",
    "plan_view",
    "policies_table",
    "profile_page",
    "profile_view",
    "ranks_table",
    "verify_view",
]
