"""Starting and inspecting runs."""
