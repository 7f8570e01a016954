"""Drawn scenes whose truth is known: what the demo model learnt from, and what edits and masks are measured against.

A scene is a frozen value with a prompt in plain English; `render` draws it with glyphs of Noto Color Emoji and gives
the exact mask of everything that its prompt names. Needs numpy, Pillow and the font; no torch.
"""
