"""What must hold: loads ``specs/``, decides which invariants concern which models, ties them to tests."""
