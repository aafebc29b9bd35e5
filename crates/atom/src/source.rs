//! Where models come from: from what the user typed for `--model` to a path on this machine.
//!
//! Four forms are understood: a name of the [`catalog`], a hub id (`org/name`, or
//! `org/name:FILE.gguf`), a folder, and a `.gguf` file. The last two are only checked. The others
//! are looked up in the cache (`ATOM_HOME`) and fetched when they are not there: each source of a
//! name is tried in order, and the checksum decides, not the place a file came from.
//!
//! Nothing that failed its checksum is ever left under its final name: a file is written as
//! `NAME.partial`, hashed while it is written, flushed to disk and only then renamed. A stamp
//! beside the files remembers what was verified, so that a start reads no gigabyte twice.
//!
//! This module knows no tensor and no tokenizer: it never looks into a model file.

mod cache;
mod catalog;
mod error;
mod fetch;
mod hub;
mod options;
mod progress;
mod select;
mod spec;
mod wheel;

#[cfg(test)]
mod tests;

pub(crate) use error::SourceError;
pub(crate) use options::{SourceOptions, cache_home};
pub(crate) use progress::Progress;

use cache::{Depth, Shelf, Verdict};
use error::Failure;
use fetch::Want;
use spec::Spec;
use std::fmt;
use std::path::PathBuf;

/// The name that is served when the user gives none.
pub(crate) const DEFAULT_MODEL: &str = "smollm2-135m";

/// A model that lies on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolvedModel {
    /// A `.gguf` file, or a folder with `config.json` and its weights.
    pub(crate) path: PathBuf,
    /// What the API calls it: the catalog name, the hub id, or the file's or folder's own name.
    pub(crate) served_name: String,
}

/// One line of [`list`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    /// What to type.
    pub(crate) name: String,
    /// One sentence.
    pub(crate) description: String,
    /// Bytes of the download, nearly (the hub decides); for a cached model, the bytes on disk.
    pub(crate) size_bytes: u64,
    /// SPDX name, or the licence's own.
    pub(crate) licence: String,
    /// Where it lies, when it is in the cache and whole.
    pub(crate) cached: Option<PathBuf>,
}

/// Finds the model, fetching it into the cache when it isn't there.
pub(crate) fn resolve(spec: &str, options: &SourceOptions) -> Result<ResolvedModel, SourceError> {
    obtain(spec, options, Depth::Stamped)
}

/// `atom pull`: like [`resolve`], but what lies in the cache is hashed again, stamp or not, and a
/// path is refused since there is nothing to fetch.
pub(crate) fn pull(spec: &str, options: &SourceOptions) -> Result<ResolvedModel, SourceError> {
    if let Spec::Local(path) = spec::parse(spec)? {
        return Err(SourceError::NothingToPull { path });
    }
    obtain(spec, options, Depth::Full)
}

/// The catalog, and what else is in the cache.
pub(crate) fn list(options: &SourceOptions) -> Vec<Listed> {
    let mut rows = Vec::new();
    let mut catalog_keys = Vec::new();
    for entry in catalog::ENTRIES {
        let shelf = Shelf::new(&options.home, entry.name);
        let cached = match shelf.check(entry.pinned.as_ref(), Depth::Stat) {
            Verdict::Whole(path) => Some(path),
            Verdict::Absent | Verdict::Broken(_) => None,
        };
        rows.push(Listed {
            name: entry.name.into(),
            description: entry.description.into(),
            size_bytes: shelf.stamped_bytes().filter(|_| cached.is_some()).unwrap_or(entry.size_bytes),
            licence: entry.licence.into(),
            cached,
        });
        catalog_keys.push(entry.name);
    }
    for shelf in Shelf::all(&options.home) {
        let Some(stamped) = shelf.stamped_name().filter(|_| !catalog_keys.contains(&shelf.key())) else {
            continue;
        };
        if let Verdict::Whole(path) = shelf.check(None, Depth::Stat) {
            rows.push(Listed {
                name: stamped,
                description: "fetched from the hub".into(),
                size_bytes: shelf.stamped_bytes().unwrap_or(0),
                licence: "see its page".into(),
                cached: Some(path),
            });
        }
    }
    rows
}

/// [`list`] as a table for a person.
pub(crate) struct Table<'a>(pub(crate) &'a [Listed]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: fn(&Listed) -> usize, title: &str| {
            self.0.iter().map(column).max().unwrap_or(0).max(title.len())
        };
        let name = width(|row| row.name.len(), "NAME");
        let licence = width(|row| row.licence.len(), "LICENCE");
        writeln!(f, "{:name$}  {:>9}  {:6}  {:licence$}  WHAT", "NAME", "SIZE", "CACHED", "LICENCE")?;
        for row in self.0 {
            let cached = if row.cached.is_some() { "yes" } else { "no" };
            let size = progress::size(row.size_bytes);
            writeln!(
                f,
                "{:name$}  {size:>9}  {cached:6}  {:licence$}  {}",
                row.name, row.licence, row.description
            )?;
        }
        Ok(())
    }
}

fn obtain(spec: &str, options: &SourceOptions, depth: Depth) -> Result<ResolvedModel, SourceError> {
    let want = match spec::parse(spec)? {
        Spec::Local(path) => return spec::open_local(&path),
        Spec::Known(entry) => Want::of_entry(entry),
        Spec::Hub { repo, file } => Want::of_repo(&repo, file),
    };
    let path = obtain_wanted(&want, options, depth)?;
    Ok(ResolvedModel { path, served_name: want.served_name })
}

/// The model in the cache, fetched if it isn't there whole.
fn obtain_wanted(want: &Want, options: &SourceOptions, depth: Depth) -> Result<PathBuf, SourceError> {
    let shelf = Shelf::new(&options.home, &want.key);
    // Without the lock: a cache that this user may only read must do.
    let broken = match shelf.check(want.pinned(), depth) {
        Verdict::Whole(path) => return Ok(path),
        Verdict::Broken(broken) => Some(broken.why),
        Verdict::Absent => None,
    };
    if options.offline {
        return Err(SourceError::Offline { spec: want.typed(), folder: shelf.dir().into(), broken });
    }
    let _lock = shelf.lock(options.progress)?;
    // Another process may have fetched it while this one waited for the lock.
    match shelf.check(want.pinned(), depth) {
        Verdict::Whole(path) => return Ok(path),
        Verdict::Broken(broken) => {
            options.progress.note(&format!("{}: {}; fetching it again", want.typed(), broken.why));
            shelf.discard(&broken)?;
        }
        Verdict::Absent => {}
    }
    fetch::fetch(want, &shelf, options)
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Self {
        Self::Here(error)
    }
}
