"""One self-contained HTML page of a plan, a rehearsal or a measurement: pictures, and a table beside each."""

from trainfit.report.html.page import comparison_page, plan_page, profile_page

__all__ = ["comparison_page", "plan_page", "profile_page"]
