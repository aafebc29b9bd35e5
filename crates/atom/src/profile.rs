//! A profile of steps as a file that trace viewers read: the "Trace Event Format" of Chromium, which Perfetto
//! opens too. A line for every lane, a bar for every step.

use atom_rank::StepRecord;
use atom_serve::{Profile, ProfileRefusal};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Writes the steps into a new file of `folder`, which is made if it isn't there. `now_ms` names the file.
pub(crate) fn write(
    folder: &Path,
    (steps, steps_lost): &(Vec<StepRecord>, u64),
    now_ms: u128,
) -> Result<Profile, ProfileRefusal> {
    let file = folder.join(format!("atom-steps-{now_ms}.json"));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&file, trace(steps, *steps_lost).to_string()));
    match written {
        Ok(()) => Ok(Profile { file, steps: steps.len(), steps_lost: *steps_lost }),
        Err(error) => Err(ProfileRefusal::Unwritten { file, reason: error.to_string() }),
    }
}

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
}
