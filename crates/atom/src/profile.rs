//! A profile of steps as a file that trace viewers read: the "Trace Event Format" of Chromium, which Perfetto
//! opens too. A line for every lane, a bar for every step.

use atom_rank::StepRecord;
use atom_serve::{Profile, ProfileRefusal};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes the steps into a new file of `folder`, which is made if it isn't there. `now_ms` names the file. Of the
/// profiles in it the newest [`PROFILES_MAX`] stay; other files are not touched.
pub(crate) fn write(
    folder: &Path,
    (steps, steps_lost): &(Vec<StepRecord>, u64),
    now_ms: u128,
) -> Result<Profile, ProfileRefusal> {
    let mut file = folder.join(name(now_ms));
    let written = std::fs::create_dir_all(folder).and_then(|()| {
        // Two may end within a millisecond, and clocks are set back: the newest has the largest number.
        let first = profiles(folder)?.last().map_or(now_ms, |(last, _)| now_ms.max(last + 1));
        let (taken, mut out) = (first..)
            .find_map(|number| match File::create_new(folder.join(name(number))) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                other => Some(other.map(|out| (folder.join(name(number)), out))),
            })
            .expect("numbers don't end")?;
        file = taken;
        let written = out.write_all(trace(steps, *steps_lost).to_string().as_bytes());
        if written.is_err() {
            // Half a trace is none; that it stays where not even this works is said by the error.
            let _ = std::fs::remove_file(&file);
        }
        written
    });
    if written.is_ok()
        && let Err(error) = remove_old(folder)
    {
        tracing::warn!("old profiles stay in {}: {error}", folder.display());
    }
    match written {
        Ok(()) => Ok(Profile { file, steps: steps.len(), steps_lost: *steps_lost }),
        Err(error) => Err(ProfileRefusal::Unwritten { file, reason: error.to_string() }),
    }
}

fn name(number: u128) -> String {
    format!("{PREFIX}{number}{SUFFIX}")
}

/// The profiles of a folder by number.
fn profiles(folder: &Path) -> io::Result<Vec<(u128, PathBuf)>> {
    let mut profiles = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        if let Some(number) = number.and_then(|digits| digits.parse::<u64>().ok()) {
            profiles.push((number.into(), entry.path()));
        }
    }
    profiles.sort();
    Ok(profiles)
}

/// Removes all profiles but the newest.
fn remove_old(folder: &Path) -> io::Result<()> {
    let profiles = profiles(folder)?;
    for (_, old) in &profiles[..profiles.len().saturating_sub(PROFILES_MAX)] {
        match std::fs::remove_file(old) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // Somebody else may have removed it.
            _ => {}
        }
    }
    Ok(())
}

/// Profiles that are kept. The largest has some 20 MB.
const PROFILES_MAX: usize = 16;
const PREFIX: &str = "atom-steps-";
const SUFFIX: &str = ".json";

fn trace(steps: &[StepRecord], steps_lost: u64) -> Value {
    let lanes: BTreeSet<u16> = steps.iter().map(|step| step.lane.0).collect();
    let names = lanes.into_iter().map(|lane| {
        json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": format!("lane {lane}")}})
    });
    let bars = steps.iter().map(|step| {
        // Microseconds, as the format has them. The exchange before it is in the gap.
        json!({
            "ph": "X",
            "name": format!("{} rows", step.bucket_rows),
            "pid": 0,
            "tid": step.lane.0,
            "ts": step.at_us.saturating_sub(step.replay_us.into()),
            "dur": step.replay_us,
            "args": {
                "step": step.step.0,
                "epoch": step.epoch,
                "decode_rows": step.decode_rows,
                "prefill_rows": step.prefill_rows,
                "wait_us": step.wait_us,
                "running": step.running,
                "waiting": step.waiting,
            },
        })
    });
    json!({
        "traceEvents": names.chain(bars).collect::<Vec<_>>(),
        "displayTimeUnit": "ms",
        "otherData": {"steps_lost": steps_lost},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use atom_base::{LaneId, StepNo};

    #[test]
    fn every_step_is_a_bar_of_its_lane() {
        let step = |lane, number| StepRecord {
            lane: LaneId(lane),
            step: StepNo(number),
            at_us: 1000 * number,
            replay_us: 400,
            bucket_rows: 16,
            decode_rows: 2,
            prefill_rows: 7,
            ..StepRecord::default()
        };
        let folder = std::env::temp_dir().join(format!("atom-profile-{}", std::process::id()));
        let steps = (vec![step(0, 1), step(1, 1), step(0, 2)], 4);
        let profile = write(&folder, &steps, 7).unwrap();
        let read: Value = serde_json::from_slice(&std::fs::read(&profile.file).unwrap()).unwrap();
        assert_eq!((profile.steps, profile.steps_lost, &read["otherData"]["steps_lost"]), (3, 4, &json!(4)));
        let events = read["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 2 + 3);
        let last = &events[4];
        assert_eq!((&last["tid"], &last["ts"], &last["dur"]), (&json!(0), &json!(1600), &json!(400)));
        let args = &last["args"];
        assert_eq!((&args["step"], &args["prefill_rows"]), (&json!(2), &json!(7)));
        // Where a file stands in the way of the folder.
        let refused = write(&profile.file, &steps, 7).unwrap_err();
        assert!(matches!(refused, ProfileRefusal::Unwritten { .. }), "{refused}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_of_profiles_keeps_the_newest_and_what_is_not_ours() {
        let folder = std::env::temp_dir().join(format!("atom-profiles-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let others = ["atom-steps-mine.json", "atom-steps-1.json.gz", "notes.txt"];
        others.iter().for_each(|name| std::fs::write(folder.join(name), "x").unwrap());
        // Two of them in the same millisecond.
        let numbers = (90..90 + PROFILES_MAX as u128 + 4).chain([100]);
        let written: Vec<_> = numbers.map(|ms| write(&folder, &(Vec::new(), 0), ms).unwrap().file).collect();
        let newest = &written[5..];
        assert!(newest.iter().all(|file| file.exists()) && written[..5].iter().all(|file| !file.exists()));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), PROFILES_MAX + others.len());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
