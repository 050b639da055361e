"""Alembic revisions, one folder and one branch per package that owns tables."""
