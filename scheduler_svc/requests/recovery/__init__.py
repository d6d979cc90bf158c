"""Recovery: live requests rebuilt from the journal."""
