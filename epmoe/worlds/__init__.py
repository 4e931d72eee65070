"""Who the peers are and whose memory is whose: one process with all ranks, or one rank a process."""
