"""What routes read from and write to disk: uploads, exports, previews, statistics."""
