"""Figures: timelines, tables, curves and trace export."""
