"""Drawn scenes with exact masks: the demo model's training data, and the truth that edits and masks are compared with.

A scene is a frozen value with a prompt in plain English; `render` draws it with glyphs of Noto Color Emoji and gives
the exact mask of every object that its prompt names. Needs numpy, Pillow and the font; no torch.
"""
