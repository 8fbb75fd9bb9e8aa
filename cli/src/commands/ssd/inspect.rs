//! `kvctl ssd inspect`.

use super::target::{Content, InUse, Target, foreign_kind, peek};
use crate::context::Context;
use crate::output;
use kvpool_disk::medium::{DATA_START, FORMAT, MediumRefused, Superblock};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Show what a disk, partition or file holds
///
/// It writes nothing, and needs no right to write. Of a medium that a running node uses it shows the
/// superblock as it is now.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ssd inspect /var/lib/kvpool/ssd
  kvctl ssd inspect /dev/nvme0n1p1 --output json | jq .medium.generation")]
pub(crate) struct Args {
    /// The disk, partition or file
    path: PathBuf,
}

/// The result of the command.
#[derive(Debug, Serialize)]
pub(super) struct Inspection {
    path: String,
    /// True while another process has the device open.
    pub(super) in_use: bool,
    /// `medium`, `blank`, `unknown`, or the name of the refusal: `foreign`, `damaged`, ...
    pub(super) content: &'static str,
    /// The meaning of the content for an operator.
    pub(super) note: String,
    /// `None` if another process has the device.
    device_bytes: Option<u64>,
    /// `None` if another process has the device.
    engine: Option<&'static str>,
    pub(super) medium: Option<Medium>,
}

/// The content of a superblock.
#[derive(Debug, Serialize)]
pub(super) struct Medium {
    cluster: String,
    pub(super) id: String,
    pub(super) generation: u64,
    pub(super) clean: bool,
    format_version: u32,
    size_bytes: u64,
    capacity_bytes: u64,
    bad_bytes: u64,
    bad_ranges: Vec<[u64; 2]>,
}

impl From<&Superblock> for Medium {
    fn from(superblock: &Superblock) -> Self {
        let bad = superblock.bad.as_slice();
        Self {
            cluster: superblock.cluster.to_string(),
            id: superblock.medium.to_string(),
            generation: superblock.generation.0,
            clean: superblock.clean,
            // A superblock of another format is refused.
            format_version: FORMAT,
            size_bytes: superblock.size,
            capacity_bytes: superblock.size.saturating_sub(DATA_START),
            bad_bytes: bad.iter().map(|range| range.end - range.start).sum(),
            bad_ranges: bad.iter().map(|range| [range.start, range.end]).collect(),
        }
    }
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let found = tokio::task::spawn_blocking(move || inspect(&args.path)).await??;
    context.output.show(&found, table)
}

pub(super) fn inspect(path: &Path) -> anyhow::Result<Inspection> {
    let target = match Target::open_to_read(path) {
        Err(error) if error.is::<InUse>() => return Ok(in_use(path)),
        other => other?,
    };
    let (content, note, medium) = match target.content()? {
        Content::Blank => (
            "blank",
            "a node that is started with this path formats it".to_owned(),
            None,
        ),
        Content::Medium(medium) => {
            let superblock = medium.superblock();
            let note = match (superblock.generation.0, superblock.clean) {
                (0, _) => "formatted, and not attached to its pool yet",
                (_, true) => "the last node let go of it cleanly",
                (_, false) => "the last node was killed: what it wrote last may be torn",
            };
            ("medium", note.to_owned(), Some(superblock.into()))
        }
        Content::Refused(refused) => (refused.kind(), describe(path, &refused), None),
    };
    Ok(Inspection {
        path: path.display().to_string(),
        in_use: false,
        content,
        note,
        device_bytes: Some(target.engine.size()),
        engine: Some(target.engine.kind().name()),
        medium,
    })
}

/// The content of a device that is not a medium of this release.
pub(super) fn describe(path: &Path, refused: &MediumRefused) -> String {
    match refused {
        MediumRefused::Foreign => foreign_kind(path).to_owned(),
        MediumRefused::Damaged => "a medium of kvpool with both superblocks damaged".to_owned(),
        other => other.to_string(),
    }
}

fn in_use(path: &Path) -> Inspection {
    let superblock = peek(path);
    let note = match superblock {
        Some(_) => {
            "another process has it open, such as a kvstore-node: `kvctl status` shows its state"
        }
        None => "another process has it open, or the system uses it, for instance for a mount",
    };
    Inspection {
        path: path.display().to_string(),
        in_use: true,
        content: if superblock.is_some() {
            "medium"
        } else {
            "unknown"
        },
        note: note.to_owned(),
        device_bytes: None,
        engine: None,
        medium: superblock.as_ref().map(Medium::from),
    }
}

fn table(found: &Inspection) -> String {
    let mut facts = output::facts();
    facts.add_row(["path", &found.path]);
    facts.add_row(["in use", if found.in_use { "yes" } else { "no" }]);
    facts.add_row(["holds", found.content]);
    facts.add_row(["", &found.note]);
    if let Some(bytes) = found.device_bytes {
        facts.add_row(["device", &output::bytes(bytes)]);
    }
    if let Some(engine) = found.engine {
        facts.add_row(["engine", engine]);
    }
    if let Some(medium) = &found.medium {
        facts.add_row(["cluster", &medium.cluster]);
        facts.add_row(["medium", &medium.id]);
        facts.add_row(["generation", &medium.generation.to_string()]);
        facts.add_row(["clean", if medium.clean { "yes" } else { "no" }]);
        facts.add_row(["format", &medium.format_version.to_string()]);
        facts.add_row(["size", &output::bytes(medium.size_bytes)]);
        facts.add_row(["room for blocks", &output::bytes(medium.capacity_bytes)]);
        let bad = match medium.bad_ranges.len() {
            0 => "none".to_owned(),
            ranges => format!("{ranges}, {}", output::bytes(medium.bad_bytes)),
        };
        facts.add_row(["bad ranges", &bad]);
    }
    facts.to_string()
}
