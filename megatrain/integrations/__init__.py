"""Other libraries' trainers with megatrain's training steps in them; `import megatrain` imports none of this."""
