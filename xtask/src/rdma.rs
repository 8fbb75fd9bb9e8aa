//! `cargo xtask rdma`: runs the tests that need an RDMA device, in virtual machines with a software
//! device.
//!
//! ```text
//!  cargo build, cargo test --no-run                 Debian's packages
//!         │ programs                                  │ kernel.sh, image.sh: target/rdma/SERIES
//!         │                                           │ emulator.sh: target/rdma/emulator, to measure
//!         ▼                                           ▼
//!  tests/rdma/cases/NAME.sh ──► run.sh (a guest) or pair.sh (two on one Ethernet) ──► exit status
//! ```
//!
//! The processor of a guest is emulated. So a case shows whether the results are right. A speed can
//! be compared only with another speed in the same guest.

mod case;
mod machine;
mod programs;

use crate::cargo::{root, succeeds, target_dir};
use crate::packages::Packages;
use crate::tally::Tally;
use anyhow::{Context, Result, bail};
use case::Case;
use programs::Programs;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The exit status of a case that cannot run here.
const SKIPPED: i32 = 77;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Debian kernel series of the guests; the series complete work requests differently
    #[arg(long, value_enum, default_value_t = Kernel::Both)]
    kernel: Kernel,
    /// Run only cases whose name contains one of these
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Skip the measurements: they need a build of the profile `dist` and take most of the time
    #[arg(long)]
    quick: bool,
    /// In the test binaries, run only tests whose name contains this
    #[arg(long, value_name = "PART")]
    tests: Option<String>,
    /// Report whether this machine can run the guests; run nothing
    #[arg(long)]
    probe: bool,
    /// Install the missing Debian packages that the guests need
    #[arg(long)]
    install: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Kernel {
    #[value(name = "6.1")]
    Old,
    #[value(name = "6.12")]
    New,
    Both,
}

impl Kernel {
    const fn series(self) -> &'static [&'static str] {
        match self {
            Self::Old => &["6.1"],
            Self::New => &["6.12"],
            Self::Both => &["6.1", "6.12"],
        }
    }
}

/// The part that `cargo xtask test` runs, on one kernel: bytes over verbs are right.
const IN_TESTS: [&str; 3] = ["verbs", "conformance", "peers"];

/// Runs the cases that belong to the tests, or counts them as skipped if this machine cannot run guests.
pub(crate) fn test(packages: Packages, tally: &mut Tally) -> Result<()> {
    let place = target_dir()?.join("rdma");
    println!("\n▶ checking whether guests with RDMA can run here");
    if !machine::probe(&place, packages)? {
        tally.skip("RDMA in a guest", "this machine cannot run it (see above)");
        return Ok(());
    }
    if let Err(error) = machine::provide(packages) {
        tally.skip("RDMA in a guest", &format!("{error:#}"));
        return Ok(());
    }
    for series in Kernel::Old.series() {
        let mut kernel = Command::new(scripts().join("kernel.sh"));
        if !succeeds(kernel.arg(series).arg(place.join(series)))? {
            tally.skip(
                "RDMA in a guest",
                "no guest kernel could be downloaded (see above)",
            );
            return Ok(());
        }
    }
    let args = Args {
        kernel: Kernel::Old,
        only: IN_TESTS.map(str::to_owned).into(),
        quick: true,
        tests: None,
        probe: false,
        install: packages == Packages::Add,
    };
    let cases = case::read_all(&scripts().join("cases"))?;
    let mut of_guests = Tally::default();
    run_cases(&args, &place, &chosen(&args, &cases), &mut of_guests)?;
    // A test that skips in the guest fails its case.
    if of_guests.is_good() && of_guests.skipped == 0 {
        let count = tally.passed_elsewhere(&NO_DEVICE);
        println!("{count} tests found no RDMA device on this host; they passed in the guest");
    }
    tally.add("RDMA in a guest", of_guests, true);
    Ok(())
}

/// The message of a test that finds no device.
const NO_DEVICE: [&str; 2] = [
    "this host has no RDMA device",
    "libibverbs.so.1 (rdma-core 32 or later) cannot be used",
];

/// Runs all cases, also after a failure. Returns whether all passed and at least one ran.
pub(crate) fn run(args: &Args) -> Result<bool> {
    let place = target_dir()?.join("rdma");
    let packages = Packages::asked(args.install);
    if args.probe {
        return machine::probe(&place, packages);
    }
    let cases = case::read_all(&scripts().join("cases"))?;
    let cases = chosen(args, &cases);
    if cases.is_empty() {
        bail!("no case matches --only: the cases are the files in tests/rdma/cases");
    }
    machine::provide(packages)?;
    let begin = Instant::now();
    let mut tally = Tally::default();
    run_cases(args, &place, &cases, &mut tally)?;
    println!("\n{} s in all", begin.elapsed().as_secs());
    tally.print();
    Ok(tally.is_good())
}

fn chosen<'c>(args: &Args, cases: &'c [Case]) -> Vec<&'c Case> {
    let wanted = |case: &&Case| {
        args.only.is_empty()
            || args
                .only
                .iter()
                .any(|part| case.name.contains(part.as_str()))
    };
    let cases = cases.iter().filter(wanted);
    cases
        .filter(|case| !args.quick || !case.is_measurement())
        .collect()
}

fn run_cases(args: &Args, place: &Path, cases: &[&Case], tally: &mut Tally) -> Result<()> {
    let programs = Programs::build(cases)?;
    let emulator = place.join("emulator");
    if cases.iter().any(|case| case.is_measurement()) && !make_emulator(&emulator)? {
        println!("measuring with the installed qemu: results with checksums are lower");
    }
    for series in args.kernel.series() {
        let image = place.join(series);
        let Some(package) = make_image(series, &image)? else {
            tally.check("a guest's kernel and file system", false);
            continue;
        };
        println!("\nguests with {package}");
        for case in cases {
            let log = place.join(format!("{}-{series}.log", case.name));
            let guest = Guest {
                image: &image,
                emulator: case.is_measurement().then_some(&emulator),
                tests: args.tests.as_deref(),
            };
            run_case(case, &guest, &programs, &log, tally).with_context(|| case.name.clone())?;
        }
    }
    Ok(())
}

fn scripts() -> PathBuf {
    root().join("tests/rdma")
}

/// Makes the kernel of that series, unless it exists, and the image of its guests. Returns the
/// kernel's package. Returns `None` on a failure, which the scripts have printed.
fn make_image(series: &str, image: &Path) -> Result<Option<String>> {
    let mut kernel = Command::new(scripts().join("kernel.sh"));
    let mut files = Command::new(scripts().join("image.sh"));
    // The image is made each time: this takes a second, and this machine's libraries may have
    // changed.
    if !succeeds(kernel.arg(series).arg(image))? || !succeeds(files.arg(image))? {
        return Ok(None);
    }
    let package = std::fs::read_to_string(image.join("package"))?;
    Ok(Some(package.trim().to_owned()))
}

/// Builds an emulator for measurements in `place`, unless the installed emulator is suitable. Returns whether a
/// suitable emulator exists. The script prints the reason of a failure.
fn make_emulator(place: &Path) -> Result<bool> {
    succeeds(Command::new(scripts().join("emulator.sh")).arg(place))
}

/// The settings of the guests of a case.
struct Guest<'a> {
    image: &'a Path,
    /// Where a built emulator may lie. Without one, the installed emulator runs.
    emulator: Option<&'a PathBuf>,
    /// Run only the tests of test binaries whose names contain this text.
    tests: Option<&'a str>,
}

/// Runs a case, prints its result, and counts it.
fn run_case(
    case: &Case,
    guest: &Guest<'_>,
    programs: &Programs,
    log: &Path,
    tally: &mut Tally,
) -> Result<()> {
    let name = &case.name;
    let paths = match programs.of(case) {
        Ok(paths) => paths,
        Err(absent) => {
            println!("skipped  {name}: {absent}");
            tally.skip(name, &absent);
            return Ok(());
        }
    };
    let script = if case.guests == 2 {
        "pair.sh"
    } else {
        "run.sh"
    };
    let console = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let begin = Instant::now();
    let status = Command::new(scripts().join(script))
        .arg(guest.image)
        .arg(&case.script)
        .args(paths)
        .env("GUEST_LIMIT", case.limit.to_string())
        .env("GUEST_MEMORY", case.memory.to_string())
        .env(
            "GUEST_SETTINGS",
            guest
                .tests
                .map_or(String::new(), |part| format!("TESTS={part}")),
        )
        .envs(guest.emulator.map(|place| ("GUEST_EMULATOR", place)))
        .stdout(console.try_clone()?)
        .stderr(console)
        .status()
        .with_context(|| format!("cannot run {script}"))?;
    let seconds = begin.elapsed().as_secs();
    let console = std::fs::read(log)?;
    let console = String::from_utf8_lossy(&console);
    match status.code() {
        Some(0) => {
            tally.passed += 1;
            println!("passed   {name}  {seconds} s");
            for line in case::figures(&console) {
                println!("           {line}");
            }
        }
        Some(SKIPPED) => {
            let why = case::reason(&console).unwrap_or("the case gave no reason");
            println!("skipped  {name}  {seconds} s: {why}");
            tally.skip(name, why);
        }
        _ => {
            tally.failed += 1;
            println!("FAILED   {name}  {seconds} s; the guest's console:\n{console}");
        }
    }
    Ok(())
}
