"""What several tests share: fakes, helpers and the processes that tests start. No test is here."""
