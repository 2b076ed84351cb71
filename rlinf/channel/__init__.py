"""Channels: rows go from the ranks that make them straight to the ranks that read them.

Read in this order: `routing` (which rank gets which rows; pure), `mailbox` (where a rank's incoming rows wait).
"""
