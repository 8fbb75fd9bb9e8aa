//! Proof that the tests of the invariants can fail. Each mechanism is switched off in a copy of the
//! tree, and its test must fail. In the untouched copy the test must pass. With `--simulate`, the
//! simulation of a pool takes the place of all tests (ADR 0052).

mod bytes;
mod devices;
mod drains;
mod evacuation;
mod handoff;
mod master;
mod media;
mod pins;
mod reach;
mod replicas;
mod returned;
mod security;
mod silence;
mod tenants;

use crate::cargo::{DAEMONS, cargo, root, target_dir};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One mechanism: its text in the source, and the text that replaces it when the mechanism is off.
struct Mechanism {
    invariant: u8,
    what: &'static str,
    file: &'static str,
    on: &'static str,
    off: &'static str,
    /// The package and name of the test that must fail.
    package: &'static str,
    test: &'static str,
}

/// Every mechanism, grouped by subject.
const MECHANISMS: [&[Mechanism]; 13] = [
    master::MECHANISMS,
    bytes::MECHANISMS,
    devices::MECHANISMS,
    media::MECHANISMS,
    pins::MECHANISMS,
    returned::MECHANISMS,
    replicas::MECHANISMS,
    evacuation::MECHANISMS,
    drains::MECHANISMS,
    tenants::MECHANISMS,
    security::MECHANISMS,
    silence::MECHANISMS,
    handoff::MECHANISMS,
];

/// The longest time for the seeds of one mechanism.
const MOST_SECONDS: &str = "900";

/// The exit status of `timeout` after it ended its command.
const OUT_OF_TIME: i32 = 124;

const UNNOTICED: &str = "NOT NOTICED";
const OUT_OF_REACH: &str = "out of reach";

/// The mechanisms to switch off.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only mechanisms of the invariant with this number [default: all]
    invariant: Option<u8>,
    /// Only mechanisms whose file or test has this text in its name
    #[arg(long, value_name = "TEXT")]
    of: Option<String>,
    /// Run this many seeds of the simulation instead of the mechanisms' tests
    #[arg(long, value_name = "SEEDS")]
    simulate: Option<u64>,
}

/// Switches mechanisms off one by one. Returns true if every test failed without its mechanism. With `simulate` it
/// returns true if every changed tree compiled: a mechanism that the simulation does not notice is a result, not a
/// failure.
pub(crate) fn run(args: &Args) -> Result<bool> {
    let chosen = chosen(args)?;
    let place = target_dir()?.join("switch-off");
    let (tree, build) = (place.join("tree"), place.join("build"));
    copy_tree(&tree)?;
    if let Some(seeds) = args.simulate
        && !matches!(try_seeds(seeds, &tree, &build)?, (Verdict::Unnoticed, _))
    {
        bail!("the simulation fails with every mechanism in its place");
    }
    let mut tally = HashMap::<&str, u32>::new();
    let passing = match args.simulate {
        None => passing(&chosen, &tree, &build)?,
        Some(_) => HashSet::new(),
    };
    for mechanism in chosen {
        let Mechanism {
            invariant,
            what,
            test,
            ..
        } = mechanism;
        let unreachable = args.simulate.and_then(|_| reach::out_of_reach(mechanism));
        if let Some(reason) = unreachable {
            *tally.entry(OUT_OF_REACH).or_default() += 1;
            println!("invariant {invariant}, without \"{what}\": {OUT_OF_REACH}: {reason}");
            continue;
        }
        let (verdict, by) = match args.simulate {
            None if !passing.contains(&(mechanism.package, *test)) => {
                (Verdict::Untested, (*test).to_owned())
            }
            None => (
                without(mechanism, &tree, || try_test(mechanism, &tree, &build))?,
                (*test).to_owned(),
            ),
            Some(seeds) => without(mechanism, &tree, || try_seeds(seeds, &tree, &build))?,
        };
        let verdict = match verdict {
            Verdict::Noticed => "noticed",
            Verdict::Unnoticed => UNNOTICED,
            Verdict::Broken => "DOES NOT BUILD",
            Verdict::Late => "DOES NOT END",
            Verdict::Untested => "DOES NOT PASS WITH IT",
        };
        *tally.entry(verdict).or_default() += 1;
        println!("invariant {invariant}, without \"{what}\": {verdict} by {by}");
    }
    println!("{tally:?}");
    let simulates = args.simulate.is_some();
    let is_fact = |verdict| simulates && matches!(verdict, UNNOTICED | OUT_OF_REACH);
    let mut verdicts = tally.into_keys();
    Ok(verdicts.all(|verdict| verdict == "noticed" || is_fact(verdict)))
}

/// The mechanisms that the arguments name.
fn chosen(args: &Args) -> Result<Vec<&'static Mechanism>> {
    let all = MECHANISMS.into_iter().flatten();
    let chosen = all
        .filter(|m| args.invariant.is_none_or(|only| only == m.invariant))
        .filter(|m| {
            let is_named = |text: &String| m.file.contains(text) || m.test.contains(text);
            args.of.as_ref().is_none_or(is_named)
        });
    let chosen: Vec<&Mechanism> = chosen.collect();
    if chosen.is_empty() {
        bail!("no mechanism is of that invariant and has that text in its file or test");
    }
    Ok(chosen)
}

/// The texts of mechanisms that do not stand exactly once in their file of the working tree.
pub(crate) fn faults_of_texts() -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for mechanism in MECHANISMS.into_iter().flatten() {
        let file = root().join(mechanism.file);
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", mechanism.file))?;
        faults.extend(fault_of_text(mechanism, &text));
    }
    Ok(faults)
}

/// The fault of a mechanism's text, if the file has the content `of_file`.
fn fault_of_text(mechanism: &Mechanism, of_file: &str) -> Option<String> {
    let Mechanism { file, on, off, .. } = mechanism;
    if on == off {
        return Some(format!("{file}: `{on}` is the same when it is off"));
    }
    match of_file.matches(on).count() {
        1 => None,
        count => Some(format!("{file} contains `{on}` {count} times, not once")),
    }
}

enum Verdict {
    Noticed,
    Unnoticed,
    Broken,
    /// The seeds took longer than [`MOST_SECONDS`].
    Late,
    /// The test fails in the untouched copy, or no test has its name.
    Untested,
}

/// The tests of these mechanisms that run and pass in the untouched copy, by package and name.
fn passing(
    mechanisms: &[&Mechanism],
    tree: &Path,
    build: &Path,
) -> Result<HashSet<(&'static str, &'static str)>> {
    let tests: BTreeSet<_> = mechanisms.iter().map(|of| (of.package, of.test)).collect();
    let mut passing = HashSet::new();
    for (package, test) in tests {
        match run_test(package, test, tree, build)? {
            Some(ended) if ended.succeeded && ended.passed > 0 => {
                passing.insert((package, test));
            }
            _ => println!("{package}: {test} does not pass in the untouched copy"),
        }
    }
    Ok(passing)
}

/// Runs `attempt` while the mechanism is off in the copy of the tree.
fn without<T>(
    mechanism: &Mechanism,
    tree: &Path,
    attempt: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let file = tree.join(mechanism.file);
    let text = std::fs::read_to_string(&file)?;
    if let Some(fault) = fault_of_text(mechanism, &text) {
        bail!(fault);
    }
    std::fs::write(&file, text.replace(mechanism.on, mechanism.off))?;
    let outcome = attempt();
    std::fs::write(&file, text)?;
    outcome
}

/// Whether a seed of the simulation breaks a rule, and which seed.
fn try_seeds(seeds: u64, tree: &Path, build: &Path) -> Result<(Verdict, String)> {
    let of_simulator = ["--quiet", "build", "-p", "kvpool-sim"];
    let mut build_simulator = in_copy(&of_simulator, tree, build);
    // One file differs from the build before.
    build_simulator
        .env("CARGO_INCREMENTAL", "1")
        .env("CARGO_PROFILE_DEV_DEBUG", "0");
    if !quietly(build_simulator)? {
        return Ok((Verdict::Broken, "the simulator".to_owned()));
    }
    let count = seeds.to_string();
    // A history may never end without its mechanism.
    let output = Command::new("timeout")
        .arg(MOST_SECONDS)
        .arg(build.join("debug/kvpool-sim"))
        .args(["--no-shrink", "--seeds", &count])
        .stderr(Stdio::null())
        .output()
        .context("cannot run the simulator")?;
    if output.status.success() {
        return Ok((Verdict::Unnoticed, format!("{seeds} seeds")));
    }
    if output.status.code() == Some(OUT_OF_TIME) {
        return Ok((Verdict::Late, format!("{MOST_SECONDS} s of seeds")));
    }
    // A failing run names its seeds, the lowest first. A simulator that ended otherwise noticed as well.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let first = text.lines().find(|line| line.starts_with("seed "));
    let first = first.unwrap_or("the simulator's end");
    Ok((Verdict::Noticed, first.chars().take(160).collect()))
}

fn try_test(mechanism: &Mechanism, tree: &Path, build: &Path) -> Result<Verdict> {
    let ended = run_test(mechanism.package, mechanism.test, tree, build)?;
    Ok(match ended {
        None => Verdict::Broken,
        Some(ended) if ended.succeeded => Verdict::Unnoticed,
        Some(_) => Verdict::Noticed,
    })
}

/// How a run of tests ended.
struct Ended {
    succeeded: bool,
    /// The number of tests that passed.
    passed: u64,
}

/// Runs the tests of a package whose names contain `test`. `None` when the copy does not build.
fn run_test(package: &str, test: &str, tree: &Path, build: &Path) -> Result<Option<Ended>> {
    let built = ["--quiet", "build"]
        .iter()
        .chain(&DAEMONS)
        .copied()
        .collect::<Vec<_>>();
    let builds = quietly(in_copy(&built, tree, build))?
        && quietly(in_copy(
            &["--quiet", "test", "--no-run", "-p", package],
            tree,
            build,
        ))?;
    if !builds {
        return Ok(None);
    }
    let run = ["--quiet", "test", "-p", package, "--tests", "--", test];
    let output = in_copy(&run, tree, build).output();
    let output = output.context("cannot run cargo test")?;
    Ok(Some(Ended {
        succeeded: output.status.success(),
        passed: passed(&String::from_utf8_lossy(&output.stdout)),
    }))
}

/// The number of passed tests in the output of test binaries.
fn passed(output: &str) -> u64 {
    let of_line = |line: &str| {
        let (count, _) = line
            .strip_prefix("test result: ok. ")?
            .split_once(" passed")?;
        count.parse::<u64>().ok()
    };
    output.lines().filter_map(of_line).sum()
}

fn in_copy(args: &[&str], tree: &Path, build: &Path) -> Command {
    let mut command = cargo(args);
    command.current_dir(tree).env("CARGO_TARGET_DIR", build);
    command
}

fn quietly(mut command: Command) -> Result<bool> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    Ok(output.status.success())
}

/// Copies every file that git lists, as it is in the working tree. All other files of the copy are
/// removed.
fn copy_tree(tree: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()?;
    if !listed.status.success() {
        bail!("git cannot list the files of {}", root().display());
    }
    let files = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
    copy_files(root(), files.split('\0'), tree)
}

/// Copies the files of `files` that exist below `from_root`, and removes all other files from the
/// copy.
fn copy_files<'f>(
    from_root: &Path,
    files: impl Iterator<Item = &'f str>,
    tree: &Path,
) -> Result<()> {
    let files: Vec<&str> = files
        .filter(|file| from_root.join(file).is_file())
        .collect();
    std::fs::create_dir_all(tree)?;
    let kept: HashSet<PathBuf> = files.iter().map(|file| tree.join(file)).collect();
    remove_others(tree, &kept)?;
    for file in files {
        let to: PathBuf = tree.join(file);
        let bytes = std::fs::read(from_root.join(file))?;
        // An unchanged file keeps its time, so that cargo does not build it again.
        if std::fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(directory) = to.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(&to, bytes)?;
    }
    Ok(())
}

/// Removes the files below `directory` that are not in `kept`, and the directories that become empty.
fn remove_others(directory: &Path, kept: &HashSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_others(&path, kept)?;
            if std::fs::read_dir(&path)?.next().is_none() {
                std::fs::remove_dir(&path)?;
            }
        } else if !kept.contains(&path) {
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_name_no_mechanism_are_an_error() {
        let named = |invariant, of: Option<&str>| Args {
            invariant,
            of: of.map(str::to_owned),
            simulate: None,
        };
        assert!(!chosen(&named(None, None)).unwrap().is_empty());
        assert!(chosen(&named(Some(u8::MAX), None)).is_err());
        assert!(chosen(&named(None, Some("no such test"))).is_err());
    }

    #[test]
    fn files_that_left_the_tree_leave_the_copy() {
        let place = std::env::temp_dir().join(format!("switch-off-{}", std::process::id()));
        let (from, copy) = (place.join("from"), place.join("copy"));
        std::fs::create_dir_all(from.join("tests/old")).unwrap();
        for file in ["lib.rs", "tests/old/main.rs"] {
            std::fs::write(from.join(file), file).unwrap();
        }
        let files = ["", "lib.rs", "tests/old/main.rs", "tests/old.rs"];
        copy_files(&from, files.into_iter(), &copy).unwrap();
        assert!(copy.join("tests/old/main.rs").is_file());
        // A program of tests becomes a file of the same name, which git lists beside the old one.
        std::fs::remove_dir_all(from.join("tests/old")).unwrap();
        std::fs::write(from.join("tests/old.rs"), "new").unwrap();
        copy_files(&from, files.into_iter(), &copy).unwrap();
        assert!(copy.join("lib.rs").is_file() && copy.join("tests/old.rs").is_file());
        assert!(!copy.join("tests/old").exists());
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn passed_tests_are_counted_over_all_binaries() {
        let output = "\nrunning 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored\n\n\
                      running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored\n\n\
                      running 1 test\n.\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        assert_eq!(passed(output), 3);
        assert_eq!(
            passed("running 0 tests\n\ntest result: ok. 0 passed; 0 failed"),
            0
        );
        assert_eq!(passed("test result: FAILED. 4 passed; 1 failed"), 0);
    }

    #[test]
    fn a_text_that_does_not_stand_once_in_its_file_is_a_fault() {
        let mechanism = Mechanism {
            invariant: 1,
            what: "a check",
            file: "lib.rs",
            on: "check();",
            off: "",
            package: "kvpool-types",
            test: "a_test",
        };
        let fault = |text| fault_of_text(&mechanism, text);
        assert_eq!(fault("before(); check(); after();"), None);
        assert!(fault("before();").unwrap().contains("0 times"));
        assert!(fault("check(); check();").unwrap().contains("2 times"));
        let same = Mechanism {
            off: "check();",
            ..mechanism
        };
        assert!(fault_of_text(&same, "check();").is_some());
    }

    #[test]
    fn each_mechanism_stands_once_in_its_file_and_its_test_exists() {
        assert_eq!(faults_of_texts().unwrap(), Vec::<String>::new());
        let listed = Command::new("git")
            .args(["grep", "--no-color", "-hE", "fn [a-z0-9_]+", "--", "*.rs"])
            .current_dir(root())
            .output()
            .unwrap();
        let functions = String::from_utf8(listed.stdout).unwrap();
        for mechanism in MECHANISMS.into_iter().flatten() {
            let name = mechanism.test.rsplit("::").next().unwrap();
            let is_there = functions.contains(&format!("fn {name}"));
            assert!(is_there, "no test is called {name}");
        }
    }
}
