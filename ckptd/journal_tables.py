"""Tables of the journal. One of another schema is set aside and rebuilt, never migrated (P8)."""

from __future__ import annotations

SCHEMA = 3

FOUND = "found"
"""In meta: what lay in save_dir when the journal was begun (daemon/ordering.py); empty: not looked at yet."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE facts (identity TEXT NOT NULL, path TEXT NOT NULL, facts TEXT NOT NULL, seen_at REAL NOT NULL,
                    PRIMARY KEY (identity, path));
CREATE TABLE saves (id INTEGER PRIMARY KEY, tag TEXT NOT NULL, sealed TEXT NOT NULL, state TEXT NOT NULL,
                    found_first INTEGER NOT NULL, adopted INTEGER NOT NULL, held INTEGER NOT NULL DEFAULT 0,
                    derived TEXT NOT NULL DEFAULT '{}', weights TEXT NOT NULL DEFAULT '{}',
                    seen_at REAL NOT NULL, sealed_at REAL NOT NULL,
                    ended_at REAL);
CREATE TABLE ships (save_id INTEGER NOT NULL, remote TEXT NOT NULL, form TEXT NOT NULL, record TEXT NOT NULL,
                    started_at REAL, ended_at REAL, PRIMARY KEY (save_id, remote, form));
CREATE TABLE objects (save_id INTEGER NOT NULL, remote TEXT NOT NULL, form TEXT NOT NULL, key TEXT NOT NULL,
                      bytes INTEGER NOT NULL, flushed_bytes INTEGER NOT NULL, crc64 TEXT NOT NULL, proof TEXT,
                      token TEXT NOT NULL,
                      PRIMARY KEY (save_id, remote, form, key));
CREATE TABLE deletions (id INTEGER PRIMARY KEY, save_id INTEGER NOT NULL, trash TEXT NOT NULL,
                        intent TEXT NOT NULL, state TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE decisions (kind TEXT NOT NULL, tag TEXT NOT NULL, serial INTEGER NOT NULL, body TEXT NOT NULL,
                        PRIMARY KEY (kind, tag, serial));
INSERT INTO meta VALUES ('found', '');
"""
