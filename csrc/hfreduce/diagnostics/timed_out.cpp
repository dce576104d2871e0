// The message of a timeout: a sentence, and a table with one row per rank, missing ranks first.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "diagnostics/fault.h"
#include "diagnostics/monitor.h"

namespace hfreduce {

namespace {

constexpr size_t kRows = 64;  // a table of a thousand ranks is of no use

using Line = std::vector<std::string>;

std::string seconds(int64_t ms) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(ms) / 1000);
  return text;
}

std::string state(const RankStatus& status) {
  switch (status.answered) {
    case RankStatus::silent:
      return "does not answer (stopped, or its host is cut off?)";
    case RankStatus::left:
      return "has left the group";
    case RankStatus::died:
      return "has died";
    default:
      break;
  }
  if (!status.last.sequence) return "in no operation yet";
  return (status.running ? "in it for " : "ended it ") + seconds(status.age_ms) + (status.running ? "" : " ago");
}

Line line(const Roster& roster, const RankStatus& status, bool missing) {
  const Peer& peer = roster.peers[status.rank];
  const std::string frame(status.frame, strnlen(status.frame, sizeof(status.frame)));
  return {std::to_string(peer.global_rank),
          peer.hostname,
          missing ? "missing" : "",
          status.last.sequence ? told(status.last) : "-",
          state(status),
          frame.empty() ? "-" : frame};
}

std::string table(const std::vector<Line>& lines) {
  std::vector<size_t> widths(lines[0].size());
  for (const Line& line : lines)
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  std::string text;
  for (const Line& line : lines) {
    std::string row = " ";
    for (size_t i = 0; i < line.size(); ++i) row += " " + line[i] + std::string(widths[i] - line[i].size() + 1, ' ');
    text += "\n" + row.substr(0, row.find_last_not_of(' ') + 1);
  }
  return text;
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool message(const Call& call) { return call.kind == Kind::send || call.kind == Kind::recv; }

// A rank that waits for a message may wait for a rank that itself waits for another. If all ranks that are waited for
// answer, these are the ranks that do not answer.
std::vector<int> behind_them(const std::vector<int>& missing, const std::vector<RankStatus>& statuses) {
  std::vector<int> silent;
  for (const RankStatus& status : statuses) {
    if (status.answered != RankStatus::silent) continue;
    if (contains(missing, status.rank)) return {};
    silent.push_back(status.rank);
  }
  return silent;
}

std::string names(const Roster& roster, const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + roster.peers[ranks[i]].name();
  return text;
}

// The ranks missing from a collective. A rank that runs an earlier collective may itself wait for another one, such as
// a neighbour between hosts: idle and silent ranks are blamed before it. Silence alone proves little, so ranks that are
// waited for are blamed first.
std::vector<int> culprits(const Call& call, const std::vector<int>& missing, const std::vector<RankStatus>& statuses) {
  if (message(call)) return missing;
  std::vector<int> idle_missing, idle, behind_missing, behind;
  for (const RankStatus& status : statuses) {
    const bool here = status.answered == RankStatus::here, waited_for = contains(missing, status.rank);
    if (here && status.collective >= call.sequence) continue;
    behind.push_back(status.rank);
    if (waited_for) behind_missing.push_back(status.rank);
    if (here && status.running) continue;
    idle.push_back(status.rank);
    if (waited_for) idle_missing.push_back(status.rank);
  }
  for (const std::vector<int>& found : {idle_missing, idle, behind_missing, behind})
    if (!found.empty()) return found;
  return missing;
}

}  // namespace

Fault timed_out(const Roster& roster, const Call& call, const std::vector<int>& waited_for,
                const std::vector<RankStatus>& statuses, milliseconds waited) {
  std::vector<int> missing = culprits(call, waited_for, statuses);
  std::string text = "Timed out after " + seconds(waited.count()) + " on " + roster.me().name() + " in " + told(call);
  if (!missing.empty()) text += ", waiting for " + names(roster, missing);
  if (message(call)) {
    const std::vector<int> silent = behind_them(missing, statuses);
    if (!silent.empty()) text += ", while " + names(roster, silent) + " does not answer", missing = silent;
  }
  const auto is_missing = [&](const RankStatus& status) { return contains(missing, status.rank); };
  std::vector<RankStatus> sorted = statuses;
  std::stable_partition(sorted.begin(), sorted.end(), is_missing);
  const size_t rows = std::min(sorted.size(), std::max(kRows, missing.size()));
  std::vector<Line> lines = {{"rank", "host", "", "last operation", "state", "Python"}};
  for (size_t i = 0; i < rows; ++i) lines.push_back(line(roster, sorted[i], is_missing(sorted[i])));
  text += "." + table(lines);
  if (rows < sorted.size()) text += "\n  and " + std::to_string(sorted.size() - rows) + " more that are not missing";
  text +=
      "\nA missing rank that is in Python is late, or on another path through the program; if it is only late, a "
      "longer "
      "timeout helps.";
  return Fault(Fault::Cause::timeout, missing, text);
}

}  // namespace hfreduce
